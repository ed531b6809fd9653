"""Roles of one job, judged each by itself and beside each other. Pure.

Roles run on the same kind of device: the noise of one is a prior for the others. The ranks of a
role are each other's witnesses; where a role has one rank only, the other roles witness for it: in
a pipeline they compute the same micro-batches.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.predictor.cost.features import StepSample
from pacekeeper.predictor.online.state import Evidence, Judgement, among, begin
from pacekeeper.predictor.online.thresholds import mixed, weighted
from pacekeeper.predictor.online.update import update_evidence


def update_roles(
    config: DetectorConfig, by_role: Mapping[str, Evidence], samples: Mapping[str, StepSample]
) -> tuple[dict[str, Evidence], dict[str, Judgement]]:
    """Take in one complete step of a job of several roles.

    Args:
        config: settings of the detector; roles share its rate of false alarms equally.
        by_role: what the detector knows of each role; a role without an entry is new.
        samples: the step of each role that ran.

    Returns:
        What the detector knows now, and what it says of each role that ran.
    """
    share = config.false_alarms_per_job_day / len({*by_role, *samples})
    config = replace(config, false_alarms_per_job_day=share)
    late = {role: _late(by_role.get(role), sample) for role, sample in samples.items()}
    now, judged = dict(by_role), dict[str, Judgement]()
    for role, sample in samples.items():
        own, others = now.get(role, begin()), tuple[float, ...]()
        if len(sample.ranks) == 1:
            told = ((name, value) for name, value in late.items() if name != role)
            others = tuple(value for _, value in told if value is not None)
        if own.other_roles or others:
            own = replace(own, other_roles=others)
        now[role], judged[role] = update_evidence(config, own, sample)
    return _share_noise(now), judged


def _late(evidence: Evidence | None, sample: StepSample) -> float | None:
    """Log observed / expected of a role's middle healthy rank in a step; None: not known."""
    if evidence is None or evidence.model is None:
        return None
    expected_s = evidence.model.expected_s(sample.features)
    ratio = np.log(np.maximum(sample.observed_s, 1e-9) / expected_s)
    healthy = ratio[~among(sample.ranks, evidence.slow)]
    return float(np.median(healthy)) if len(healthy) else None


def _share_noise(by_role: Mapping[str, Evidence]) -> dict[str, Evidence]:
    """Give each role of a job the noise that the others showed, in steps in which one is fitted."""
    if not any(own.model is not None and own.steps_since_fit == 0 for own in by_role.values()):
        return dict(by_role)
    shared = {}
    for role, own in by_role.items():
        others = tuple(
            kept.noise for name, kept in by_role.items() if name != role and kept.noise is not None
        )
        own = replace(own, others=others)
        if own.limits is not None and own.noise is not None:
            own = replace(own, limits=weighted(own.limits, mixed(own.noise, others)))
        shared[role] = own
    return shared
