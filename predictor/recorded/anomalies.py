"""Anomalies of a recorded run, and their measurement from the findings of a live detector."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import exp, log, sqrt
from typing import TypeVar

import numpy as np

from pacekeeper.core.incidents.findings import Finding, Tier
from pacekeeper.predictor.cost.features import Positions
from pacekeeper.predictor.detector.state import Judgement
from pacekeeper.predictor.recorded.trace import OwnInputTable, OwnTransferTable
from pacekeeper.predictor.stats.robust import MEDIAN_ERROR

NO_LOSS = 1e-6  # of S above 1: rounding
TWO_SIDED = 1.96  # sigmas of a 95 % interval
STILL_SLOW = 0.5  # of a slowdown: steps below are counted as recovered
K = TypeVar("K", int, str)


class AnomalyKind(StrEnum):
    """Kind of anomaly: a fault (compute, link, host) or work that is distributed unevenly."""

    COMPUTE = "compute"
    LINK = "link"
    HOST = "host"
    STAGE_IMBALANCE = "stage_imbalance"
    SEQUENCE_IMBALANCE = "sequence_imbalance"
    EXPERT_IMBALANCE = "expert_imbalance"


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """One finding in a recorded run.

    Attributes:
        rank: the slow rank; None if no single rank is responsible.
        stage: of the rank; None if no stage is responsible.
        slowdown: observed over expected time; for an imbalance, over the time with even work.
        low: lower end of the 95 % confidence interval of `slowdown`.
        high: upper end.
        last_step: None if it lasts to the end of the record.
    """

    kind: AnomalyKind
    rank: int | None
    stage: int | None
    slowdown: float
    low: float
    high: float
    first_step: int
    tier: Tier
    reason: str
    last_step: int | None = None
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """How much shorter steps would be: ratios of step times, 1.0 where nothing would be gained.

    `slowdown` is S = step time / ideal step time (Lin et al., OSDI 2025, eq. 1). The maps give S
    with the real times of one part and ideal times of all others.
    """

    slowdown: float
    by_dp: Mapping[int, float] = field(default_factory=dict)
    by_stage: Mapping[int, float] = field(default_factory=dict)
    by_op: Mapping[str, float] = field(default_factory=dict)
    by_rank: Mapping[int, float] = field(default_factory=dict)
    worst_workers_share: float = 0.0  # M_W: of the loss, removed by fixing the worst 3 % of ranks
    last_stage_share: float = 0.0  # M_S: of the loss, removed by fixing the last stage
    notes: tuple[str, ...] = ()  # steps that could not be replayed, and why

    def shares(self, parts: Mapping[K, float]) -> dict[K, float]:
        """Return each part's share of the loss: (S of the part - 1) / (S - 1); {} without any loss.

        Parts overlap (a rank belongs to a stage) and mask each other: shares need not sum to 1.
        """
        lost = self.slowdown - 1.0
        if lost <= NO_LOSS:
            return {}
        return {part: (slowdown - 1.0) / lost for part, slowdown in parts.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReport:
    """Result of the analysis of a trace. `what_if` is None if the trace has no timeline."""

    anomalies: tuple[Anomaly, ...]
    what_if: WhatIf | None
    notes: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Episode:
    """A finding with the log ratios of its steps.

    `over_step` is the step at which the detector closed it, None if it stayed open to the end.
    """

    finding: Finding
    over_step: int | None = None
    steps: list[int] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)

    def holds(self, step: int) -> bool:
        """Return whether the finding was open in this step."""
        is_before_end = self.over_step is None or step <= self.over_step
        return self.finding.onset_step <= step and is_before_end


def steps_of(table: OwnInputTable | OwnTransferTable) -> Iterator[tuple[int, Positions]]:
    """Yield each step of the table with the positions of its rows; steps and ranks ascend."""
    order = np.lexsort((table.rank, table.step))
    steps, first = np.unique(table.step[order], return_index=True)
    yield from zip(steps.tolist(), np.split(order, first[1:]), strict=True)


def episodes_of(judgements: Sequence[Judgement]) -> list[Episode]:
    """Return the findings of these judgements in order of detection, without their log ratios."""
    episodes = list[Episode]()
    is_open: dict[int | None, Episode] = {}

    def open_(finding: Finding) -> None:
        is_open[finding.rank] = Episode(finding=finding)
        episodes.append(is_open[finding.rank])

    for judgement in judgements:
        for finding in judgement.findings:
            open_(finding)
        for rank in judgement.recovered:
            is_open.pop(rank).over_step = judgement.step
        if judgement.common.found is not None:
            open_(judgement.common.found)
        if judgement.common.is_over:
            is_open.pop(None).over_step = judgement.step
    return episodes


def anomaly_of(
    episode: Episode, kind: AnomalyKind, stage_of: Mapping[int, int], sigma: float
) -> Anomaly:
    """Return the anomaly of an episode, with the slowdown measured over all its steps.

    Steps at the end in which the rank had recovered, but the detector had not closed the finding
    yet, are left out.

    Args:
        episode: with the log ratio of at least one step.
        kind: of the anomaly.
        stage_of: stage by rank.
        sigma: standard deviation of the log ratio of one step.
    """
    finding, rank = episode.finding, episode.finding.rank
    assert episode.ratios, "a finding is of steps"
    ratios, count = np.array(episode.ratios), len(episode.ratios)
    if episode.over_step is not None:
        is_slow = ratios > STILL_SLOW * log(finding.slowdown)
        count = int(np.flatnonzero(is_slow)[-1]) + 1 if is_slow.any() else count
    level = float(np.median(ratios[:count]))
    error = MEDIAN_ERROR * sigma / sqrt(count)
    is_over = episode.over_step is not None
    last_step = episode.steps[count - 1] if is_over else None
    until = f"to step {last_step}, and recovered" if is_over else "to the end of the record"
    return Anomaly(
        kind=kind,
        rank=rank,
        stage=None if rank is None else stage_of.get(rank),
        slowdown=exp(level),
        low=exp(level - TWO_SIDED * error),
        high=exp(level + TWO_SIDED * error),
        first_step=finding.onset_step,
        last_step=last_step,
        tier=finding.tier,
        reason=f"{finding.reason}; x{exp(level):.2f} over {count} steps, {until}",
    )
