"""Findings of a live detector in a recorded run: how slow, over all steps they lasted. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log, sqrt

import numpy as np

from pacekeeper.core.incidents.findings import Finding
from pacekeeper.predictor.cost.features import Positions
from pacekeeper.predictor.offline.trace import OwnInputTable, OwnTransferTable
from pacekeeper.predictor.offline.verdict import Trouble, TroubleKind
from pacekeeper.predictor.online.state import Judgement
from pacekeeper.predictor.stats.robust import MEDIAN_ERROR

TWO_SIDED = 1.96  # sigmas of a 95 % interval
STILL_SLOW = 0.5  # of a slowdown


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


def trouble_of(
    episode: Episode, kind: TroubleKind, stage_of: Mapping[int, int], sigma: float
) -> Trouble:
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
    return Trouble(
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
