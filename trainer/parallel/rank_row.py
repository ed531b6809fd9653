"""The fullest arc of a circle of ranks, a quick guess at what no split can relieve. Pure.

Planned hosts are arcs of a circle of ranks, and what is too full is mostly such an arc: running
sums find it, where a flow takes several rounds. Only a start is made of it: for hosts of any other
kind it is a weaker one, never a wrong one.

Shape suffixes: W ranks of the group, which are places of the circle; E experts; S stretches of it,
by first and last place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt

NARROW = 4  # hosts of an expert that tell who stands beside whom: more stand beside everybody

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankRow:
    """order_W: the ranks from place to place; key_E: the stretch that an expert's hosts need, as
    `first * W + last`; where their arc goes over the end of the row, W * W more than that of the
    stretch they leave free. none_S: True where a stretch would end before it begins.
    """

    order_W: Ints
    key_E: Ints
    none_S: Flags

    @classmethod
    def of(cls, hosts: Sequence[Sequence[int]], num_ranks: int) -> "RankRow":
        """hosts[expert]: positions in the group. Of two circles the one with shorter arcs."""
        order, (keys, _) = min(
            ((order, _arcs(hosts, order)) for order in (range(num_ranks), _walk(hosts, num_ranks))),
            key=lambda entry: entry[1][1],
        )
        return cls(
            order_W=np.array(order, dtype=np.int64),
            key_E=np.array(keys, dtype=np.int64),
            none_S=np.tri(num_ranks, k=-1, dtype=np.bool_),
        )

    def fullest(self, rows_E: Ints, capacity_W: Ints) -> Flags:
        """[W] the arc with most rows of experts that live only there, per its capacity.

        Sums are of whole numbers below 2^53 and quotients are rounded as IEEE 754 says, so that
        all ranks find the same one.
        """
        num = len(self.order_W)
        tables = np.bincount(self.key_E, rows_E, 2 * num * num).reshape(2, num, num)
        inside = tables[0, ::-1].cumsum(axis=0)[::-1].cumsum(axis=1)
        # What lives outside a stretch: before it, after it, or over the end of the row.
        outside = tables[1].cumsum(axis=0)[:, ::-1].cumsum(axis=1)[:, ::-1]
        outside[1:] += inside[0, :-1, None]
        outside[:, :-1] += inside[1:, -1]
        up_to = np.concatenate([[0.0], np.cumsum(capacity_W[self.order_W])])
        capacity = up_to[1:] - up_to[:-1, None]
        capacity[self.none_S] = np.inf
        inside /= capacity
        rest = up_to[-1] - capacity
        rest[0, -1] = np.inf  # outside all ranks
        outside /= rest
        whole = float(rows_E.sum() / up_to[-1])
        best_in, best_out = int(inside.argmax()), int(outside.argmax())
        in_full, out_full = float(inside.flat[best_in]), float(outside.flat[best_out])
        if whole >= max(in_full, out_full):
            return np.ones(num, dtype=np.bool_)
        is_outside = out_full > in_full
        first, last = divmod(best_out if is_outside else best_in, num)
        result = np.full(num, is_outside)
        result[self.order_W[first : last + 1]] = not is_outside
        return result


def _arcs(hosts: Sequence[Sequence[int]], order: Sequence[int]) -> tuple[list[int], int]:
    """The key of each expert's shortest arc, and the length of all arcs together."""
    num = len(order)
    place = {rank: at for at, rank in enumerate(order)}
    keys, length = [], 0
    for on in hosts:
        at = sorted(place[rank] for rank in on)
        gaps = [(later - here - 1, here + 1) for here, later in pairwise(at)]
        widest, free = max(gaps, default=(0, 0))
        if widest > num - 1 - at[-1] + at[0]:
            keys.append(num * num + free * num + free + widest - 1)
            length += num - widest
        else:
            keys.append(at[0] * num + at[-1])
            length += at[-1] - at[0] + 1
    return keys, length


def _walk(hosts: Sequence[Sequence[int]], num_ranks: int) -> list[int]:
    """Ranks from an end (one with fewest neighbours) on, always to who shares most experts."""
    shared: list[dict[int, int]] = [{} for _ in range(num_ranks)]
    for on in hosts:
        if len(on) <= NARROW:
            for one, other in combinations(on, 2):
                shared[one][other] = shared[one].get(other, 0) + 1
                shared[other][one] = shared[other].get(one, 0) + 1
    left = dict.fromkeys(sorted(range(num_ranks), key=lambda rank: (len(shared[rank]), rank)))
    row: list[int] = []
    while left:
        beside = shared[row[-1]] if row else {}
        next_ones = [rank for rank in beside if rank in left]
        rank = min(next_ones, key=lambda r: (-beside[r], r)) if next_ones else next(iter(left))
        del left[rank]
        row.append(rank)
    return row
