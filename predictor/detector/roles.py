"""Judges the roles of one job; they share noise, and are references for ranks without peers. Pure.

Roles run on the same kind of device, so the noise of one is a prior for the others. A rank is
compared with the other ranks of its role; the only rank of a role is compared with the other roles,
which compute the same micro-batches in a pipeline.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.predictor.cost.features import StepSample
from pacekeeper.predictor.detector.state import Evidence, Judgement, among, begin
from pacekeeper.predictor.detector.thresholds import mixed, weighted
from pacekeeper.predictor.detector.update import update_evidence


def update_roles(
    config: DetectorConfig, by_role: Mapping[str, Evidence], samples: Mapping[str, StepSample]
) -> tuple[dict[str, Evidence], dict[str, Judgement]]:
    """Process one complete step of a job with several roles.

    Args:
        config: settings of the detector; roles share its rate of false alarms equally.
        by_role: detector state of each role; a role without an entry is new.
        samples: the step, by role.

    Returns:
        The new detector states, and a judgement for each role in `samples`.
    """
    share = config.false_alarms_per_job_day / len({*by_role, *samples})
    config = replace(config, false_alarms_per_job_day=share)
    late: dict[str, float | None] = {}
    if any(len(sample.ranks) == 1 for sample in samples.values()):
        late = {role: _late(by_role.get(role), sample) for role, sample in samples.items()}
    now, judged = dict(by_role), dict[str, Judgement]()
    for role, sample in samples.items():
        own, others = now.get(role, begin()), tuple[float, ...]()
        if len(sample.ranks) == 1:
            told = (value for name, value in late.items() if name != role)
            others = tuple(value for value in told if value is not None)
        if own.other_roles != others:
            own = replace(own, other_roles=others)
        now[role], judged[role] = update_evidence(config, own, sample)
    return _share_noise(now), judged


def _late(evidence: Evidence | None, sample: StepSample) -> float | None:
    """Return log(observed / expected) of a role's median healthy rank; None: not known."""
    if evidence is None or evidence.model is None:
        return None
    expected_s = evidence.model.expected_s(sample.features)
    ratio = np.log(np.maximum(sample.observed_s, 1e-9) / expected_s)
    healthy = ratio[~among(sample.ranks, evidence.slow)]
    return float(np.median(healthy)) if len(healthy) else None


def _share_noise(by_role: Mapping[str, Evidence]) -> dict[str, Evidence]:
    """Give each role the noise of the others, in steps in which a cost model was fitted."""
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
