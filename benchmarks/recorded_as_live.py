"""Whom would the live detector have named in a recorded run? It is given what replay's judge has.

That is the record's own explanation of the work (`recorded/residuals.py`), step by step and stage
by stage, with no hindsight: what is measured is the rule.
"""

from dataclasses import replace

import numpy as np

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.predictor.cost.features import (
    FEATURES,
    Array,
    MicrobatchSamples,
    Positions,
    StepSample,
)
from pacekeeper.predictor.detector.roles import update_roles
from pacekeeper.predictor.detector.state import Evidence
from pacekeeper.predictor.recorded.residuals import Residuals, TraceTimes, residuals_of, times_of
from pacekeeper.predictor.recorded.trace import Trace

CONFIG = replace(DetectorConfig(), skip_steps=0, canary_period_steps=0)
NUM_JUDGED = 2  # kinds of residuals that replay judges: all computing, and the longest chunk


def accused_live(trace: Trace) -> set[int]:
    """The ranks with a finding in any step, of all computing or of the longest kind of chunk."""
    times = times_of(trace)
    nothing_known = np.zeros((len(times.steps), len(times.rank_of)))
    return {
        times.ranks[position]
        for residuals in residuals_of(times, nothing_known)[:NUM_JUDGED]
        for layout in times.layouts
        for position in _found(times, residuals, layout)
    }


def _found(times: TraceTimes, residuals: Residuals, layout: tuple[int, int]) -> set[int]:
    stages = {f"stage {stage}": times.stage == stage for stage in np.unique(times.stage)}
    evidence, found = dict[str, Evidence](), set[int]()
    share = CONFIG.false_alarms_per_job_day / len(stages)
    config = replace(CONFIG, false_alarms_per_job_day=share)
    for step in range(*layout):
        rows = residuals.samples[times.step_of == step]
        samples = dict[str, StepSample]()
        for role, is_own in stages.items():
            told = np.flatnonzero(is_own & np.isfinite(rows).any(axis=0))
            if len(told):
                samples[role] = _sample(step, told, np.exp(rows[:, told]))
        evidence, judged = update_roles(config, evidence, samples)
        named = (finding.rank for own in judged.values() for finding in own.findings)
        found |= {rank for rank in named if rank is not None}
    return found


def _sample(step: int, ranks: Positions, ratios: Array) -> StepSample:
    """A step whose micro-batches [micro-batches, ranks] all have the same work, a second each."""
    work = np.zeros((*ratios.shape, len(FEATURES)))
    work[..., FEATURES.index("one")] = np.isfinite(ratios)
    is_whole = len(ratios) > 1 and np.isfinite(ratios).all()
    return StepSample(
        step=step,
        generation=1,
        ranks=tuple(ranks.tolist()),
        features=work.sum(axis=0),
        observed_s=np.nansum(ratios, axis=0),
        parts=MicrobatchSamples(features=work, observed_s=ratios) if is_whole else None,
    )
