"""Reports of the shape that NVIDIA Resiliency Extension gives, by its published formula.

A score is reference / median of this rank: the least median of all ranks (relative), or the least
that this rank ever had (individual). Times are milliseconds, as there.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any


class Statistic(Enum):
    """Of the times of one section."""

    MIN = auto()
    MAX = auto()
    MED = auto()
    AVG = auto()
    STD = auto()
    NUM = auto()

    def __str__(self) -> str:
        return self.name


Summary = Mapping[Statistic, float]


@dataclass(frozen=True)
class StragglerId:
    """A rank that is named, and its node."""

    rank: int
    node: str


@dataclass(frozen=True)
class Report:
    """Scores from 0 to 1 by rank; on rank 0 of all ranks where it gathers, else of the own one.

    `suspect_ranks` is ours: the ranks that pacekeeper's controller has an open finding of, by
    expected times and charts and not by this formula.
    """

    gpu_relative_perf_scores: Mapping[int, float]
    section_relative_perf_scores: Mapping[str, Mapping[int, float]]
    gpu_individual_perf_scores: Mapping[int, float]
    section_individual_perf_scores: Mapping[str, Mapping[int, float]]
    rank_to_node: Mapping[int, str]
    local_section_summaries: Mapping[str, Summary]
    local_kernel_summaries: Mapping[str, Summary]
    generate_report_elapsed_time: float
    gather_on_rank0: bool
    rank: int | None
    suspect_ranks: frozenset[int] = field(default=frozenset())

    def identify_stragglers(
        self,
        gpu_rel_threshold: float = 0.75,
        section_rel_threshold: float = 0.75,
        gpu_indiv_threshold: float = 0.75,
        section_indiv_threshold: float = 0.75,
    ) -> dict[str, Any]:
        """Who is below a threshold, under the four keys of the original."""
        return {
            "straggler_gpus_relative": self._below(
                self.gpu_relative_perf_scores, gpu_rel_threshold
            ),
            "straggler_gpus_individual": self._below(
                self.gpu_individual_perf_scores, gpu_indiv_threshold
            ),
            "straggler_sections_relative": self._sections_below(
                self.section_relative_perf_scores, section_rel_threshold
            ),
            "straggler_sections_individual": self._sections_below(
                self.section_individual_perf_scores, section_indiv_threshold
            ),
        }

    def identify_suspects(self) -> set[StragglerId]:
        """Whom pacekeeper's controller has found; nobody where no agent runs."""
        return {
            StragglerId(rank=rank, node=self.rank_to_node.get(rank, "<unk>"))
            for rank in self.suspect_ranks
        }

    def _below(self, scores: Mapping[int, float], threshold: float) -> set[StragglerId]:
        return {
            StragglerId(rank=rank, node=self.rank_to_node[rank])
            for rank, score in scores.items()
            if score < threshold
        }

    def _sections_below(
        self, scores: Mapping[str, Mapping[int, float]], threshold: float
    ) -> dict[str, set[StragglerId]]:
        found = {name: self._below(by_rank, threshold) for name, by_rank in scores.items()}
        return {name: named for name, named in found.items() if named}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """What one rank says to the others for a report; `device`: name -> (median, total) times."""

    rank: int
    node: str
    sections: Mapping[str, float]
    device: Mapping[str, tuple[float, float]]
    own_sections: Mapping[str, float]
    own_device: float


def summary_of(times: Sequence[float]) -> Summary:
    """Statistics of at least one time; the median is the lower one, as torch takes it."""
    return {
        Statistic.MIN: min(times),
        Statistic.MAX: max(times),
        Statistic.MED: statistics.median_low(times),
        Statistic.AVG: statistics.fmean(times),
        Statistic.STD: statistics.stdev(times) if len(times) > 1 else math.nan,
        Statistic.NUM: len(times),
    }


def against(references: Mapping[str, float], medians: Mapping[str, float]) -> dict[str, float]:
    """Section scores: unknown where there is no reference, or no time that a clock could see."""
    return {
        name: references.get(name, math.nan) / own if own else math.nan
        for name, own in medians.items()
    }


def weighted(references: Mapping[str, float], device: Mapping[str, tuple[float, float]]) -> float:
    """One score of a device: the mean over what it ran, weighted by the time it spent there."""
    known = {n: told for n, told in device.items() if n in references and told[0]}
    total = sum(spent for _, spent in known.values())
    if not total:
        return math.nan
    return sum(references[n] / median * spent for n, (median, spent) in known.items()) / total


def least(tables: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The least median of each name that every rank has; of others none can be told."""
    everybody = list(tables)
    names = set[str]().union(*everybody)
    return {
        name: min(table[name] for table in everybody)
        for name in names
        if all(name in table for table in everybody)
    }


def scores(
    told: Sequence[RankTimes], shown: Sequence[RankTimes], names: Iterable[str] | None
) -> tuple[dict[int, float], dict[str, dict[int, float]]]:
    """Relative scores of the ranks `shown`, beside all that were `told`: (devices, sections).

    `names`: of all sections that shall appear, with NaN where a rank has none; None: its own.
    """
    of_sections = least(one.sections for one in told)
    of_device = least({n: median for n, (median, _) in one.device.items()} for one in told)
    return (
        {one.rank: weighted(of_device, one.device) for one in shown},
        table({one.rank: against(of_sections, one.sections) for one in shown}, names),
    )


def table(
    by_rank: Mapping[int, Mapping[str, float]], names: Iterable[str] | None
) -> dict[str, dict[int, float]]:
    """Section -> rank -> score, from rank -> section -> score."""
    own = set[str]().union(*by_rank.values()) if names is None else names
    return {
        name: {rank: found.get(name, math.nan) for rank, found in by_rank.items()} for name in own
    }
