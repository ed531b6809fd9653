"""Judges the transfers of each complete step; opens and closes link incidents. Pure.

A link incident blames the link of a rank, not its device; it has no rank if the transfers of all
ranks are slow. A probe of pairs of ranks then locates the slow link (`link_verdicts.py`). Plans
price messages over slow links if the job reports their sizes. Called by `machine/steps.py`.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from pacekeeper.controller.detection import incidents, job_level, link_verdicts
from pacekeeper.controller.state.events import Command
from pacekeeper.controller.state.state import JobState, State
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.incidents.findings import FindingKind
from pacekeeper.core.telemetry.records import StepRecord
from pacekeeper.predictor.cost.features import StepSample
from pacekeeper.predictor.links.slow_links import transfer_sample, update_links


def judge_links(
    state: State,
    job: JobState,
    ended: Mapping[int, StepRecord],
    config: ControllerConfig,
    unix_s: float,
) -> tuple[State, JobState, list[Command]]:
    """Judge the transfers of a complete step; no effect where its ranks report none."""
    sample = _sample_of(ended)
    if sample is None:
        return state, job, []
    node_of = {rank: job.ranks[rank].node for rank in sample.ranks}
    links, judgement = update_links(config.detector, job.detection.links, sample, node_of)
    state, job, commands = incidents.update_incidents(
        state,
        replace(job, detection=replace(job.detection, links=links)),
        judgement,
        FindingKind.LINK,
        over=lambda rank: f"transfers of rank {rank} are back at their usual time",
        horizon_steps=config.policy.horizon_steps,
        unix_s=unix_s,
    )
    state, job, said = job_level.update_common_incident(
        state,
        job,
        judgement.common,
        config,
        unix_s,
        kind=FindingKind.LINK,
        over="transfers of all ranks are back at their usual time",
    )
    return state, link_verdicts.close_verdict(job), [*commands, *said]


def _sample_of(ended: Mapping[int, StepRecord]) -> StepSample | None:
    """Return the transfers of a step that all its ranks ended; None unless all reported some."""
    ranks = sorted(ended)
    if not ranks:
        return None
    return transfer_sample(
        ended[ranks[0]].step,
        ended[ranks[0]].generation,
        ranks,
        np.array([ended[rank].transfer_s or 0.0 for rank in ranks]),
        np.array([ended[rank].transfer_bytes for rank in ranks], dtype=np.float64),
    )
