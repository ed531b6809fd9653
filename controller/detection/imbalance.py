"""Advice on unevenly distributed work, given while no rank is slow. Pure.

While a rank is slow, or the layout was made for a slow rank, uneven work is intended. Called by
`machine/steps.py`.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from pacekeeper.controller.detection import incidents
from pacekeeper.controller.detection.peer_groups import evidence_by_role
from pacekeeper.controller.state.events import Command
from pacekeeper.controller.state.state import JobState, State
from pacekeeper.core.incidents.findings import FindingKind
from pacekeeper.core.layout.layout import Layout
from pacekeeper.predictor.cost.features import StepSample
from pacekeeper.predictor.cost.iteration import IterationPaths
from pacekeeper.predictor.imbalance.advice import lost_of_roles, update_spread


def update_advice(
    state: State,
    job: JobState,
    samples: Mapping[str, StepSample],
    paths: IterationPaths | None,
    duration_s: float,
    unix_s: float,
) -> tuple[State, JobState, list[Command]]:
    """Open, re-measure and close advice by the time that a step lost to uneven work.

    Args:
        state: The controller's state.
        job: The job.
        samples: The step's work by role.
        paths: The longest paths of the step's program; None: not known.
        duration_s: The step's duration.
        unix_s: The time now.
    """
    if (
        job.detection.evidence.slow
        or job.layouts.baseline is not None
        or job.layouts.is_provisional
    ):
        return state, job, []
    priced = []
    known = evidence_by_role(job, samples)
    for role, sample in samples.items():
        model = known[role].model
        if model is None:
            return state, job, []
        priced += [(model, part) for part in _by_stage(sample, job.layouts.current)]
    told: dict[FindingKind, float] = {
        incident.finding.kind: incident.finding.slowdown
        for incident in job.open_incidents
        if incident.finding.kind.is_advice
    }
    window, advice = update_spread(
        job.detection.spread,
        lost_of_roles(priced, paths),
        step=sample.step,
        generation=sample.generation,
        duration_s=duration_s,
        told=told,
    )
    job, commands = replace(job, detection=replace(job.detection, spread=window)), list[Command]()
    for finding in advice.opened:
        state, job, said = incidents.open_incident(state, job, finding, unix_s)
        commands += said
    for kind in advice.over:
        job, said = incidents.close(job, {None}, kind, unix_s, "the work is spread evenly now")
        commands += said
    for kind, slowdown in advice.changed.items():
        job, said = incidents.remeasure(job, None, kind, slowdown)
        commands += said
    return state, job, commands


def _by_stage(sample: StepSample, layout: Layout | None) -> list[StepSample]:
    """Split a sample by the stages of the layout: ranks of different stages have different work.

    Standby ranks are left out.
    """
    stages = {} if layout is None else {rank: at for rank, (at, _) in layout.places.items()}
    numbers = sorted({stages[rank] for rank in sample.ranks if rank in stages})
    if len(numbers) < 2:
        return [sample]
    found = []
    for number in numbers:
        own = np.array([stages.get(rank) == number for rank in sample.ranks])
        found.append(
            replace(
                sample,
                ranks=tuple(np.array(sample.ranks)[own].tolist()),
                features=sample.features[own],
                observed_s=sample.observed_s[own],
                parts=None,
            )
        )
    return found
