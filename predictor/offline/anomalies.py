"""Findings of a live detector in a recorded run: how slow, over all steps they lasted. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import exp, log, sqrt
from typing import TypeVar

import numpy as np

from pacekeeper.core.incidents.findings import Finding, Tier
from pacekeeper.predictor.cost.features import Positions
from pacekeeper.predictor.offline.trace import OwnInputTable, OwnTransferTable
from pacekeeper.predictor.online.state import Judgement
from pacekeeper.predictor.stats.robust import MEDIAN_ERROR

NO_LOSS = 1e-6  # of S above 1: rounding
TWO_SIDED = 1.96  # sigmas of a 95 % interval
STILL_SLOW = 0.5  # of a slowdown
K = TypeVar("K", int, str)


class AnomalyKind(StrEnum):
    """What was wrong: three kinds of fault, three kinds of work that is spread unevenly."""

    COMPUTE = "compute"
    LINK = "link"
    HOST = "host"
    STAGE_IMBALANCE = "stage_imbalance"
    SEQUENCE_IMBALANCE = "sequence_imbalance"
    EXPERT_IMBALANCE = "expert_imbalance"


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """One finding in a recorded run.

    `rank` and `stage` are None where the trouble is nobody's in particular. `slowdown` is observed
    over expected time (for an imbalance: over the time if the work were even), between `low` and
    `high` with 95 % confidence. `last_step`: None while it lasts to the end of the record.
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
    """How much shorter steps would be: ratios of times, 1.0 where nothing would be gained.

    `slowdown` is S = step time / ideal step time (Lin et al., OSDI 2025, eq. 1); the maps give S if
    only that part had its real times and all others ideal ones.
    """

    slowdown: float
    by_dp: Mapping[int, float] = field(default_factory=dict)
    by_stage: Mapping[int, float] = field(default_factory=dict)
    by_op: Mapping[str, float] = field(default_factory=dict)
    by_rank: Mapping[int, float] = field(default_factory=dict)
    worst_workers_share: float = 0.0  # M_W: of the loss, removed by mending the worst 3 % of ranks
    last_stage_share: float = 0.0  # M_S: of the loss, removed by mending the last stage
    notes: tuple[str, ...] = ()  # steps that could not be replayed, and why

    def shares(self, parts: Mapping[K, float]) -> dict[K, float]:
        """Of the loss, each part's own: (S of the part - 1) / (S - 1); {} where nothing is lost.

        Parts overlap (a rank is of a stage), and hide each other: shares need not add up to 1.
        """
        lost = self.slowdown - 1.0
        if lost <= NO_LOSS:
            return {}
        return {part: (slowdown - 1.0) / lost for part, slowdown in parts.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReport:
    """All that replay says of a trace; `what_if` is None where it has no timeline."""

    anomalies: tuple[Anomaly, ...]
    what_if: WhatIf | None
    notes: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Episode:
    """A finding, the step that showed that it was over (None: to the end), its log ratios."""

    finding: Finding
    over_step: int | None = None
    steps: list[int] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)

    def holds(self, step: int) -> bool:
        """Was it open in this step?"""
        is_before_end = self.over_step is None or step <= self.over_step
        return self.finding.onset_step <= step and is_before_end


def steps_of(table: OwnInputTable | OwnTransferTable) -> Iterator[tuple[int, Positions]]:
    """Each step of the table with its rows, in order; rows by rank."""
    order = np.lexsort((table.rank, table.step))
    steps, first = np.unique(table.step[order], return_index=True)
    yield from zip(steps.tolist(), np.split(order, first[1:]), strict=True)


def episodes_of(told: Sequence[Judgement]) -> list[Episode]:
    """The findings of these steps, in the order they were found, without their ratios."""
    episodes = list[Episode]()
    is_open: dict[int | None, Episode] = {}

    def open_(finding: Finding) -> None:
        is_open[finding.rank] = Episode(finding=finding)
        episodes.append(is_open[finding.rank])

    for judgement in told:
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
    """Without the steps at the end in which it was over already, and not yet told.

    sigma: of the log ratio of one step.
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
