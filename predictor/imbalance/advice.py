"""Opens and closes advice on uneven work, by its share of the step over a window of steps.

Advice is never a fault. It opens when the share is significantly above one bound and closes when it
is significantly below a lower bound; between the two nothing changes (hysteresis).
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
WORTH_TELLING = 0.03  # of a step: the smallest loss examined by the what-if analysis's authors
OVER = 0.02  # of a step: advice closes below
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
    """Shares of the newest steps lost to each kind of uneven work, newest last; of one layout."""

    generation: int = 0
    lost: Mapping[FindingKind, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Changes after a step: findings to open, kinds to close, new slowdowns of open ones."""

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
    """Add one step's losses to the window and decide on the advice.

    Steps of another layout reset the window. No advice opens before the window is full.

    Args:
        window: losses of earlier steps.
        lost_s: seconds of the step lost to each kind.
        step: its number.
        generation: of the layout.
        duration_s: of the step.
        told: the open advice: kind -> last reported slowdown, which is step time over the step time
            with even work (the share 1 - 1 / slowdown is lost).
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
    """Seconds of the step that evenly distributed sequences, and experts' rows, would save.

    Where the two mask each other, each gets the mean of its saving with and without the other
    (Shapley value): their sum is the saving of an entirely even step.
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
    """`lost_to_spread` of a job whose roles are pipeline stages, plus the loss to uneven stages.

    Sequences and experts are priced in the heaviest stage, which the others wait for. With m
    micro-batches, even stages save at least (1 - 1/m) of its excess over the mean stage: in 1F1B
    all micro-batches but one pass at the pace of the heaviest stage. The longest paths of the
    step's program give the exact saving. If the heaviest stage has a single rank, it is
    indistinguishable from a slow device, and no loss to stages is returned.

    Args:
        priced: for each role its cost model and the sample of the step.
        paths: longest paths of the step's program; None: unknown.
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
