"""Compares the steps of pipelined jobs with the duration that their schedule predicts. Pure.

The prediction combines the layout (each rank's stage and the order of its micro-batches) with the
cost model of each role (the expected time of each micro-batch). Called by `machine/steps.py`.
"""

from dataclasses import replace

import numpy as np

from pacekeeper.controller.detection.job_level import update_common_incident
from pacekeeper.controller.detection.peer_groups import evidence_by_role
from pacekeeper.controller.state.events import Command
from pacekeeper.controller.state.state import JobState, State
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.incidents.findings import FindingKind
from pacekeeper.core.layout.pipeline_schedule import Schedule
from pacekeeper.core.telemetry.attachment import Capability
from pacekeeper.predictor.cost.features import Array, FeatureTable, microbatch_features
from pacekeeper.predictor.cost.iteration import IterationPaths, iteration_paths
from pacekeeper.predictor.job_level.iteration import update_iteration
from pacekeeper.predictor.job_level.online import JobLevelState, JobStep


def paths_of(job: JobState, work: FeatureTable) -> IterationPaths | None:
    """The longest paths of the step that did this work.

    Pipelines that share experts, or deal their rows anew between stages, wait for each other in
    each micro-batch: a stage of all of them takes as long as its slowest rank.

    None: the job has no pipelines that we know, its schedule has no program, or its cost models are
    not fitted yet.
    """
    layout, schedule = job.layouts.current, schedule_of(job)
    if layout is None or schedule is None or len(layout.places) < 2:
        return None
    expected_s = _expected_s(job, work)
    if expected_s is None:
        return None
    places = layout.places
    if any(layout.experts) or layout.stage_shares:
        places = {rank: (stage, 0) for rank, (stage, _) in places.items()}
    return iteration_paths(work, expected_s, places, schedule)


def schedule_of(job: JobState) -> Schedule | None:
    """The schedule that the job runs; None: this version does not know it."""
    if job.layouts.current is None:
        return None
    shape = job.shape
    if shape is None or Capability.SCHEDULE in job.capabilities:
        return job.layouts.current.schedule
    return shape.schedule


def _expected_s(job: JobState, work: FeatureTable) -> Array | None:
    """Predict the seconds of each micro-batch by its role's cost model: [rows of `work`].

    Returns:
        None if a role has no cost model yet.
    """
    ranks, row = np.unique(work["rank"].astype(np.intp), return_inverse=True)
    roles = [job.ranks[rank].attachment.role for rank in ranks.tolist()]
    known = evidence_by_role(job, set(roles))
    features = microbatch_features(work)
    expected_s = np.empty(len(work))
    for role, evidence in known.items():
        if evidence.model is None:
            return None
        own = np.array([name == role for name in roles])[row]
        expected_s[own] = evidence.model.expected_s(features[own])
    return expected_s


def update_iterations(
    state: State,
    job: JobState,
    paths: IterationPaths | None,
    measured: JobStep,
    config: ControllerConfig,
    unix_s: float,
) -> tuple[State, JobState, list[Command]]:
    """Compare a step's duration with the longest path through its schedule; update the incident.

    Args:
        state: The controller's state.
        job: The job.
        paths: The longest paths of the step; None: there is no prediction.
        measured: The step, with its duration.
        config: The controller's settings.
        unix_s: The present time, in Unix seconds.
    """
    known = job.detection.iteration
    if paths is None:
        return state, job, []
    # Other findings without a rank: they explain what a step takes beyond its computing.
    is_explained = bool(job.detection.links.slow) or any(
        incident.finding.kind is FindingKind.INPUT
        or (incident.finding.kind is FindingKind.HOST and not known.pace.is_open)
        for incident in job.open_incidents
    )
    if is_explained and known.pace.is_open:
        known = replace(known, pace=JobLevelState())
    known, news = update_iteration(
        known,
        paths,
        step=measured.step,
        generation=measured.generation,
        duration_s=measured.duration_s,
        is_explained=is_explained,
        config=config.detector,
    )
    job = replace(job, detection=replace(job.detection, iteration=known))
    return update_common_incident(
        state, job, news, config, unix_s,
        over="iterations take again what their schedule and work explain",
    )  # fmt: skip
