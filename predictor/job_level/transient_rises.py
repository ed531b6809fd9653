"""Which rises of a job's pace went away again, where nothing is known of its work? Pure.

A schedule adds work and seldom takes it away: a lasting drop is the end of a slowdown. It began
with a jump up of about the same size, whatever the schedule did in between; or else with the newest
that is larger, of which the rest was the schedule's, or with several that were smaller.

What comes and goes again and again is a slowdown, too, unless a schedule explains it: one that
alternates does so from the start, or keeps its period.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev

from pacekeeper.predictor.stats.change_points import Level

STEADY_BLOCKS = 2  # a level of one block may be an edge inside the block
ALIKE = 1.0 / 3.0  # of a drop: so far off may the rise be that it undoes
OF_SIZE = 0.5  # of a slowdown: a jump so large leads to a kind of work, no drift does
LEAST_RECURRENCES = 2
OF_PERIOD = 0.15  # of the mean time from onset to onset: less spread is a period
LATE = 1.25  # longest later gaps: what begins after so long was not there from the start


def mean(found: Sequence[Level]) -> float:
    """Return the mean over all blocks of these levels."""
    return sum(one.mean * one.num_blocks for one in found) / sum(one.num_blocks for one in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """Levels [begin, end) that are too slow, the logs of what counts as healthy before and after
    them, and the log slowdown; None: by how much they lie above both.
    """

    begin: int
    end: int
    before: float = 0.0
    after: float = 0.0
    size: float | None = None

    @property
    def base(self) -> float:
        return (self.before + self.after) / 2.0


def passing_rises(
    found: Sequence[Level], *, floor: float
) -> tuple[list[Rise], list[int], list[Rise]]:
    """Rises that went away again, levels that began with a jump up for another reason, and rises
    that recur with a period from the start.

    A rise to a pace that the job had before, or that it jumps to at another time, is taken for a
    kind of its work. floor: the log slowdown that is the least worth telling.
    """
    steady = _steady(found, floor)
    changes = [found[after].mean - found[before].mean for before, after in pairwise(steady)]
    jumps: list[int] = []  # positions in `changes` of jumps up that nothing has undone yet
    rises: list[Rise] = []
    for at, change in enumerate(changes):
        if change > floor:
            jumps.append(at)
        elif change < -floor:
            begun = _begun_with(jumps, changes, -change, floor)
            if begun is not None:
                rises.append(_rise(found, steady, changes, begun, at))
                jumps = [jump for jump in jumps if jump < begun]
    kept, usual, periodic = list[Rise](), list[Rise](), list[Rise]()
    for together in by_size(found, rises, floor):
        is_scheduled = len(together) >= LEAST_RECURRENCES and _is_of_a_schedule(found, together)
        for rise in together:
            if is_scheduled:
                periodic.append(rise)
            elif len(together) < LEAST_RECURRENCES and _is_usual(found, steady, rise, floor):
                usual.append(rise)
            else:
                kept.append(rise)
    unexplained = {steady[at + 1] for at in jumps}
    unexplained |= {next(i for i in steady if i >= rise.begin) for rise in usual}
    kept.sort(key=lambda rise: rise.begin)
    return kept, sorted(unexplained), periodic


def _steady(found: Sequence[Level], floor: float) -> list[int]:
    """The levels that are no edge inside a block: long enough, or a pace that the job keeps
    elsewhere and that does not lie between those of its neighbours, as an edge's does.
    """
    paces = [level.mean for level in found if level.num_blocks >= STEADY_BLOCKS]
    edges = {
        at
        for at in range(1, len(found) - 1)
        if (found[at].mean - found[at - 1].mean) * (found[at + 1].mean - found[at].mean) > 0.0
    }
    return [
        at
        for at, level in enumerate(found)
        if level.num_blocks >= STEADY_BLOCKS
        or (at not in edges and any(abs(level.mean - pace) < floor / 2.0 for pace in paces))
    ]


def by_size(found: Sequence[Level], rises: Sequence[Rise], floor: float) -> list[list[Rise]]:
    """The rises, those together that are of about one size, from about one pace."""
    groups: list[list[Rise]] = []
    for rise in rises:
        size = _size(found, rise)
        for group in groups:
            first = _size(found, group[0])
            reach = max(ALIKE * max(size, first), floor)
            if abs(size - first) <= reach and abs(rise.base - group[0].base) <= reach:
                group.append(rise)
                break
        else:
            groups.append([rise])
    return groups


def _size(found: Sequence[Level], rise: Rise) -> float:
    """Return the log slowdown: of the steady levels, else of the highest. Edges would hide it."""
    inside = found[rise.begin : rise.end]
    steady = [one for one in inside if one.num_blocks >= STEADY_BLOCKS]
    inside = steady or [max(inside, key=lambda one: one.mean)]
    return mean(inside) - rise.base if rise.size is None else rise.size


def _is_of_a_schedule(found: Sequence[Level], alike: Sequence[Rise]) -> bool:
    """Do these rises keep a period, and did it begin when the job came to the pace before them?"""
    onsets = [found[rise.begin].begin for rise in alike]
    ends = [found[rise.end - 1].end for rise in alike]
    periods = [after - before for before, after in pairwise(onsets)]
    longest = max(after - before for before, after in zip(ends, onsets[1:], strict=False))
    before, base = alike[0].begin, alike[0].base
    reach = ALIKE * _size(found, alike[0])
    while before and abs(found[before - 1].mean - base) <= reach:
        before -= 1
    healthy = onsets[0] - found[before].begin
    return healthy < LATE * longest and pstdev(periods) < OF_PERIOD * fmean(periods)


def _begun_with(
    jumps: Sequence[int], changes: Sequence[float], drop: float, floor: float
) -> int | None:
    """The jump up that a drop undoes: the newest that is alike, else the newest of its size or
    more, else the first of the newest that together are; None where all are not enough.
    """
    reach = ALIKE * max(drop, floor)
    for at in reversed(jumps):
        if abs(changes[at] - drop) <= reach:
            return at
    risen = 0.0
    for at in reversed(jumps):
        risen += changes[at]
        if risen >= drop - reach:
            return at
    return None


def _rise(
    found: Sequence[Level], steady: Sequence[int], changes: Sequence[float], first: int, last: int
) -> Rise:
    """Return the rise from the jump at `first` to the drop at `last`, positions in `changes`."""
    before, after = found[steady[first]].mean, found[steady[last + 1]].mean
    drop = -changes[last]
    is_box = abs(after - before) <= ALIKE * drop
    return Rise(
        begin=steady[first] + 1,
        end=steady[last + 1],
        before=before,
        after=after,
        size=None if is_box else drop,
    )


def _is_usual(found: Sequence[Level], steady: Sequence[int], rise: Rise, floor: float) -> bool:
    """Has the job the pace of this rise at other times, other than by drifting there?"""
    inside = [i for i in steady if rise.begin <= i < rise.end]
    top = mean([found[i] for i in inside])
    size = top - rise.base if rise.size is None else rise.size
    jumped_to = {
        after
        for before, after in pairwise(steady)
        if abs(found[after].mean - found[before].mean) >= OF_SIZE * size
    }
    others = (i for i in steady if i < rise.begin or (i >= rise.end and i in jumped_to))
    return any(abs(found[i].mean - top) < floor / 2.0 for i in others)
