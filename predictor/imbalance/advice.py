"""Opens and closes advice on uneven work, by its share of the step over a window of steps. Pure.

Advice, never a fault. It is told where the share is surely above one bound, taken back where it is
surely below a lower one, and says nothing in between: no flapping at a border.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt

import numpy as np

from pacekeeper.core.incidents.findings import Finding, FindingKind, Tier
from pacekeeper.predictor.cost.features import FEATURES, Array, StepSample
from pacekeeper.predictor.cost.iteration import IterationPaths
from pacekeeper.predictor.cost.model import CostModel

WINDOW_STEPS = 32
WORTH_TELLING = 0.03  # of a step: the least that the authors of the what-if analysis look into
OVER = 0.02
SURE = 2.04  # standard errors of a mean of 32 steps: 95 % confidence
CHANGE_WORTH_TELLING = 1.5  # of the share
_ADVICE = {
    FindingKind.SEQUENCE_IMBALANCE: "ranks of a step differ in tokens and lengths: re-spread the "
    "sequences",
    FindingKind.EXPERT_IMBALANCE: "ranks of a step differ in the rows of their experts: place the "
    "busy experts' replicas anew",
    FindingKind.STAGE_IMBALANCE: "one stage has more work than the others, on all of its ranks: "
    "spread the layers evenly",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadWindow:
    """Shares of the newest steps lost to each kind, newest last; of one layout."""

    generation: int = 0
    lost: Mapping[FindingKind, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What a step changes: findings to open, kinds that are over, open ones' new slowdown."""

    opened: tuple[Finding, ...] = ()
    over: tuple[FindingKind, ...] = ()
    changed: Mapping[FindingKind, float] = field(default_factory=dict)


def update_spread(
    window: SpreadWindow,
    lost_s: Mapping[FindingKind, float],
    *,
    step: int,
    generation: int,
    duration_s: float,
    told: Mapping[FindingKind, float],
) -> tuple[SpreadWindow, Advice]:
    """Take in one step's losses. `told`: the open advice, kind -> slowdown as it was told.

    The slowdown is step time over what it would be with even work: a share of it is lost of
    1 - 1 / slowdown. Steps of another layout say nothing of this one; nothing is told before the
    window is full.
    """
    if generation != window.generation:
        window = SpreadWindow(generation=generation)
    if duration_s <= 0.0:
        return window, Advice()
    lost = {
        kind: (*window.lost.get(kind, ()), min(max(seconds / duration_s, 0.0), 0.99))[
            -WINDOW_STEPS:
        ]
        for kind, seconds in lost_s.items()
    }
    window = replace(window, lost=lost)
    opened, over, changed = [], [], {}
    for kind, shares in lost.items():
        if len(shares) < WINDOW_STEPS:
            continue
        mean = float(np.mean(shares))
        reach = SURE * float(np.std(shares, ddof=1)) / sqrt(len(shares))
        slowdown = 1.0 / (1.0 - mean)
        if kind not in told:
            if mean - reach >= WORTH_TELLING:
                opened.append(_finding(kind, mean, reach, slowdown, step))
        elif mean + reach < OVER:
            over.append(kind)
        elif _is_other(mean, 1.0 - 1.0 / told[kind]):
            changed[kind] = slowdown
    return window, Advice(opened=tuple(opened), over=tuple(over), changed=changed)


def _is_other(mean: float, before: float) -> bool:
    return max(mean, before) > CHANGE_WORTH_TELLING * max(min(mean, before), OVER)


def _finding(kind: FindingKind, mean: float, reach: float, slowdown: float, step: int) -> Finding:
    return Finding(
        kind=kind,
        tier=Tier.PROBABLE,
        rank=None,
        slowdown=slowdown,
        onset_step=step - WINDOW_STEPS + 1,
        step=step,
        reason=(
            f"{_ADVICE[kind]}; of the last {WINDOW_STEPS} steps {mean:.1%} "
            f"({mean - reach:.1%} to {mean + reach:.1%}) was waiting for the busiest"
        ),
    )


OF_SEQUENCES = ("tokens", "sum_len_squared", "num_documents", "head_tokens")


SEQUENCES = [at for at, name in enumerate(FEATURES) if name in OF_SEQUENCES]


EXPERTS = [at for at in range(1, len(FEATURES)) if at not in SEQUENCES]


def lost_to_spread(model: CostModel, sample: StepSample) -> Mapping[FindingKind, float]:
    """Seconds of the step that evenly spread sequences, and experts' rows, would save each.

    Where they hide each other each gets the mean of its saving with and without the other (Shapley
    value): together they are what a wholly even step saves.
    """

    def busiest_s(*evened: list[int]) -> float:
        work: Array = sample.features.copy()
        for columns in evened:
            work[:, columns] = work[:, columns].mean(axis=0)
        return float(model.expected_s(work).max())

    whole_s, even_s = busiest_s(), busiest_s(SEQUENCES, EXPERTS)
    even_sequences_s, even_experts_s = busiest_s(SEQUENCES), busiest_s(EXPERTS)
    return {
        FindingKind.SEQUENCE_IMBALANCE: (whole_s - even_sequences_s + even_experts_s - even_s) / 2,
        FindingKind.EXPERT_IMBALANCE: (whole_s - even_experts_s + even_sequences_s - even_s) / 2,
    }


def lost_of_roles(
    priced: Sequence[tuple[CostModel, StepSample]], paths: IterationPaths | None = None
) -> Mapping[FindingKind, float]:
    """The same of a job whose roles are the stages of its pipelines: one model and sample each.

    Sequences and experts count in the heaviest stage, which the others wait for. With m
    micro-batches even stages save (1 - 1/m) of its excess over the mean stage, or more: of 1F1B all
    but one micro-batch pass at the pace of the heaviest. Where the longest paths of the step's
    program are known they say it exactly. One rank alone has no peer to tell a heavy
    stage from a slow device by: then nothing is said of stages.
    """
    even_s = [float(model.expected_s(sample.features).mean()) for model, sample in priced]
    at = even_s.index(max(even_s))
    model, sample = priced[at]
    lost_s = dict(lost_to_spread(model, sample))
    if len(priced) > 1 and len(sample.ranks) > 1:
        excess_s = even_s[at] - sum(even_s) / len(even_s)
        lost_s[FindingKind.STAGE_IMBALANCE] = (
            excess_s * (1.0 - 1.0 / sample.num_microbatches)
            if paths is None
            else max(0.0, paths.expected_s - paths.even_stages_s)
        )
    return lost_s
