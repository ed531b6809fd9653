"""Which rises of a job's pace went away again, where nothing is known of its work? Pure.

A schedule adds work and seldom takes it away: a lasting drop is the end of a slowdown. It began
with a jump up of about the same size, whatever the schedule did in between; or else with the newest
that is larger, of which the rest was the schedule's, or with several that were smaller.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pacekeeper.predictor.stats.change_points import Level

STEADY_BLOCKS = 2  # a level of one block may be an edge inside the block
ALIKE = 1.0 / 3.0  # of a drop: so far off may the rise be that it undoes
OF_SIZE = 0.5  # of a slowdown: a jump so large leads to a kind of work, no drift does


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


def passing_rises(found: Sequence[Level], *, floor: float) -> tuple[list[Rise], list[int]]:
    """Rises that went away again, and the levels that began with a jump up for another reason.

    A rise to a pace that the job had before, or that it jumps to at another time, is taken for a
    kind of its work. floor: the log slowdown that is the least worth telling.
    """
    steady = [i for i, level in enumerate(found) if level.num_blocks >= STEADY_BLOCKS]
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
    kept, usual = list[Rise](), list[Rise]()
    for rise in rises:
        (usual if _is_usual(found, steady, rise, floor) else kept).append(rise)
    unexplained = {steady[at + 1] for at in jumps}
    unexplained |= {next(i for i in steady if i >= rise.begin) for rise in usual}
    return kept, sorted(unexplained)


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
    """Of the jump up at `first` and the drop at `last`, positions in `changes`."""
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
    top = sum(found[i].mean * found[i].num_blocks for i in inside)
    top /= sum(found[i].num_blocks for i in inside)
    size = top - rise.base if rise.size is None else rise.size
    jumped_to = {
        after
        for before, after in pairwise(steady)
        if abs(found[after].mean - found[before].mean) >= OF_SIZE * size
    }
    others = (i for i in steady if i < rise.begin or (i >= rise.end and i in jumped_to))
    return any(abs(found[i].mean - top) < floor / 2.0 for i in others)
