"""Judges the roles of one job, whose noise is shared. Pure.

Roles run on the same kind of device, so the noise of one is a prior for the others. A rank is
compared with the other ranks of its role only.
"""

from collections.abc import Mapping
from dataclasses import replace

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.predictor.cost.features import StepSample
from pacekeeper.predictor.detector.state import Evidence, Judgement, begin
from pacekeeper.predictor.detector.thresholds import mixed, weighted
from pacekeeper.predictor.detector.update import update_evidence


def update_roles(
    config: DetectorConfig, by_role: Mapping[str, Evidence], samples: Mapping[str, StepSample]
) -> tuple[dict[str, Evidence], dict[str, Judgement]]:
    """Process one complete step of a job with several roles.

    Args:
        config: settings of the detector; its rate of false alarms is that of one role.
        by_role: detector state of each role; a role without an entry is new.
        samples: the step, by role.

    Returns:
        The new detector states, and a judgement for each role in `samples`.
    """
    now, judged = dict(by_role), dict[str, Judgement]()
    for role, sample in samples.items():
        now[role], judged[role] = update_evidence(config, now.get(role, begin()), sample)
    return _share_noise(now), judged


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
