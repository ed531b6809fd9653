"""Detection of slow input: judges waits for data, opens and closes input incidents. Pure.

These incidents name no device. The planner does not act on them: no layout loads data faster.
Called by `machine/steps.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import nan

import numpy as np

from pacekeeper.controller.detection import incidents, job_level
from pacekeeper.controller.state.events import Command
from pacekeeper.controller.state.state import JobState, State
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.incidents.findings import FindingKind
from pacekeeper.core.telemetry.records import StepRecord
from pacekeeper.predictor.detector.input_stall import update_inputs


def judge_inputs(
    state: State,
    job: JobState,
    ended: Mapping[int, StepRecord],
    config: ControllerConfig,
    unix_s: float,
) -> tuple[State, JobState, list[Command]]:
    """Judge the input waits of a complete step; no effect where some rank reports none."""
    ranks = sorted(ended)
    waits = [ended[rank].input_wait_s for rank in ranks]
    if any(wait is None for wait in waits):
        return state, job, []
    inputs, judgement = update_inputs(
        config.detector,
        job.detection.inputs,
        step=ended[ranks[0]].step,
        generation=ended[ranks[0]].generation,
        ranks=ranks,
        duration_s=np.array([ended[rank].duration_s for rank in ranks]),
        input_s=np.array([nan if wait is None else wait for wait in waits]),
    )
    if judgement is None:
        return state, job, []
    state, job, commands = incidents.update_incidents(
        state,
        replace(job, detection=replace(job.detection, inputs=inputs)),
        judgement,
        FindingKind.INPUT,
        over=lambda rank: f"the input of rank {rank} is there in time again",
        horizon_steps=config.policy.horizon_steps,
        unix_s=unix_s,
    )
    state, job, said = job_level.update_common_incident(
        state,
        job,
        judgement.common,
        config,
        unix_s,
        kind=FindingKind.INPUT,
        over="the input of the ranks is there in time again",
    )
    return state, job, [*commands, *said]
