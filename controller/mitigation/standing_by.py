"""Ranks that live and have no part: no work tells that their device is well again. Pure.

So a probe does, every so often. It is the question of `probes.py`, put to all ranks; what it reads
of who stands by is judged here.
"""

from collections.abc import Mapping
from dataclasses import replace

from pacekeeper.controller.detection import incidents
from pacekeeper.controller.mitigation.way_home import all_is_over
from pacekeeper.controller.state_machine.events import Command, SaveJob
from pacekeeper.controller.state_machine.state import JobState
from pacekeeper.core.incidents.findings import Finding, FindingKind, Tier
from pacekeeper.predictor.assurance.probe_verdict import Reading, tier_of
from pacekeeper.predictor.online.state import forget

ASK_EVERY_S = 60.0


def standing_by(job: JobState) -> frozenset[int]:
    """Ranks that end each step without any work."""
    return frozenset() if job.layout is None else frozenset(job.layout.standing_by)


def is_due(job: JobState, slow: Mapping[int, Finding], now_s: float) -> bool:
    """Is it time to look whether a slow rank that stands by is well again?"""
    is_time = now_s - job.stood_by_asked_s >= ASK_EVERY_S
    return is_time and bool(standing_by(job) & slow.keys())


def take_reading(
    job: JobState, finding: Finding, reading: Reading, unix_s: float
) -> tuple[JobState, list[Command]]:
    """Of a slow rank that stands by: its finding ends where the probe is not slow any more."""
    rank = finding.rank
    assert rank is not None, "of a rank's device"
    if tier_of(reading, finding.slowdown) is not Tier.SUSPECTED:
        return job, []
    by_role = {role: forget(kept, {rank}) for role, kept in job.by_role.items()}
    job = replace(job, evidence=forget(job.evidence, {rank}), by_role=by_role)
    why = f"rank {rank} stands by and is well again: {reading}"
    job, commands = incidents.close(job, {rank}, FindingKind.DEVICE, unix_s, why)
    if not job.evidence.slow:
        job = all_is_over(job)
    return job, [*commands, SaveJob(job=job.name)]
