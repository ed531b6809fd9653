"""The newest timings of each rank, computed on request: few ranks are looked up. Pure."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isnan

from pacekeeper.predictor.detector.state import Judgement


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTiming:
    """The timings of one rank; None: not known yet (measuring)."""

    observed_s: float | None = None
    expected_s: float | None = None
    slowdown: float | None = None
    suspicion: float = 0.0


_UNKNOWN = RankTiming()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimings:
    """The newest `judgement`, and in `others` the earlier timings of ranks it does not cover."""

    judgement: Judgement | None = None
    others: Mapping[int, RankTiming] = field(default_factory=dict)

    def of(self, rank: int) -> RankTiming:
        """Return the timings of a rank. O(log ranks)."""
        judgement = self.judgement
        if judgement is None:
            return self.others.get(rank, _UNKNOWN)
        i = bisect_left(judgement.ranks, rank)
        if i == len(judgement.ranks) or judgement.ranks[i] != rank:
            return self.others.get(rank, _UNKNOWN)
        # Expected times are unknown during warm-up, of the job or of the rank's role.
        if not judgement.expected_s or isnan(judgement.expected_s[i]):
            return RankTiming(observed_s=judgement.observed_s[i])
        return RankTiming(
            observed_s=judgement.observed_s[i],
            expected_s=judgement.expected_s[i],
            slowdown=judgement.slowdown[i],
            suspicion=judgement.suspicion[i],
        )

    def at_least(self, slowdown: float) -> list[tuple[int, float]]:
        """Return (rank, slowdown) of the ranks with at least this slowdown, in no order."""
        others = ((rank, pace.slowdown) for rank, pace in self.others.items())
        found = [(rank, slow) for rank, slow in others if slow is not None and slow >= slowdown]
        if self.judgement is None or not self.judgement.expected_s:
            return found
        pairs = zip(self.judgement.ranks, self.judgement.slowdown, strict=True)
        return found + [(rank, slow) for rank, slow in pairs if slow >= slowdown]  # not the unknown

    def by(self, judgement: Judgement) -> "RankTimings":
        """Return the timings with a newer judgement; O(ranks) only where the ranks change."""
        before = self.judgement
        if before is None or before.ranks == judgement.ranks:
            return RankTimings(judgement=judgement, others=self.others)
        judged = frozenset(judgement.ranks)
        earlier = {**self.others, **{rank: self.of(rank) for rank in before.ranks}}
        others = {rank: pace for rank, pace in earlier.items() if rank not in judged}
        return RankTimings(judgement=judgement, others=others)
