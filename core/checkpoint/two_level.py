"""How many experts a snapshot copies to host memory, and how many of these go on to storage.

The two levels of MoC-System (arXiv 2408.04307, section 5): a snapshot has all dense state and
K_snapshot of the N experts of each layer, a checkpoint K_persist of those. Copies hide behind the
next forward and backward pass, so K_snapshot is the largest that fits there; writing to storage
bounds the period of checkpoints from below, so K_persist is small.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from pacekeeper.core.checkpoint.manifest import Piece
from pacekeeper.core.checkpoint.partial_experts import mean_age, select_experts
from pacekeeper.core.checkpoint.write_plan import assign_writers, cut_pieces
from pacekeeper.core.layout.layout import Block, BlockKind, Layout


def busiest_rank_bytes(
    layout: Layout, size_bytes: Mapping[Piece, int], num_rows: Mapping[Piece, int], num_saved: int
) -> int:
    """The bytes that the busiest rank copies of dense state and `num_saved` experts of each layer.

    Args:
        layout: gives the holders of each block.
        size_bytes: the bytes of each piece.
        num_rows: into how many strips each can be cut.
        num_saved: experts per layer, at least 1.
    """
    equal = [[0.0] * len(experts) for experts in layout.experts]
    chosen = select_experts(equal, num_saved, 0)
    wanted = {
        piece: size
        for piece, size in size_bytes.items()
        if piece.block.kind is not BlockKind.EXPERT or piece.block in chosen
    }
    sizes = cut_pieces(layout, wanted, num_rows)
    load = dict.fromkeys(layout.ranks, 0)
    for piece, rank in assign_writers(layout, sizes).items():
        load[rank] += sizes[piece]
    return max(load.values())


def choose_num_snapshot(
    layout: Layout,
    size_bytes: Mapping[Piece, int],
    num_rows: Mapping[Piece, int],
    *,
    budget_bytes: float,
    num_persisted: int,
) -> int:
    """K_snapshot: the most experts per layer whose copies fit into `budget_bytes` on every rank.

    Args:
        layout: gives the holders of each block.
        size_bytes: the bytes of each piece.
        num_rows: into how many strips each can be cut.
        budget_bytes: what a rank can copy while the next step computes; 0: not known yet.
        num_persisted: K_persist; a snapshot never has fewer experts.

    Returns:
        All experts while nothing is known.
    """
    most = max((len(experts) for experts in layout.experts), default=0)
    least = min(num_persisted, most)
    if budget_bytes <= 0.0:
        return most
    while least < most:  # more experts are never fewer bytes, but for how pieces are dealt
        middle = (least + most + 1) // 2
        if busiest_rank_bytes(layout, size_bytes, num_rows, middle) <= budget_bytes:
            least = middle
        else:
            most = middle - 1
    return least


def select_two_levels(
    need: Sequence[Sequence[float]],
    persist_need: Sequence[Sequence[float]],
    *,
    num_snapshot: int,
    num_persisted: int,
    number: int,
) -> tuple[frozenset[Block], frozenset[Block]]:
    """The experts of snapshot `number`, and those of them that go to storage.

    Args:
        need: need[layer][expert], the priorities of copying them; equal ones take turns.
        persist_need: the priorities of writing them; checkpoints since the last write let all of
            them take turns.
        num_snapshot: experts per layer that are copied.
        num_persisted: experts per layer of these that are written.
        number: the number of the snapshot (0, 1, ..).

    Raises:
        ValueError: fewer than one expert is written, or fewer are copied than written.
    """
    if not 1 <= num_persisted <= num_snapshot:
        raise ValueError(f"of {num_snapshot} experts that are copied {num_persisted} are written")
    copied = select_experts(need, num_snapshot, number)
    written: list[Block] = []
    for layer, needs in enumerate(persist_need):
        own = sorted(block for block in copied if block.layer == layer)
        own.sort(key=lambda block: -needs[block.index])
        written += own[:num_persisted]
    return copied, frozenset(written)


def expected_lost_token_ratio(
    *,
    num_faults: float,
    period_steps: float,
    total_steps: float,
    num_experts: int,
    num_snapshot: int,
    num_persisted: int,
    from_storage: float,
) -> float:
    """PLT where `from_storage` of the experts are restored from storage, the rest from memory.

    Experts take turns on both levels and routing is uniform: faults * (period / total) * mean age
    (research 2.3), the age of a copy in memory being that of K_snapshot.

    Raises:
        ValueError: a number of steps is not positive, or a share is none.
    """
    if total_steps <= 0 or period_steps <= 0 or not 0.0 <= from_storage <= 1.0:
        raise ValueError(f"{period_steps} of {total_steps} steps, {from_storage} from storage")
    stored, remembered = mean_age(num_experts, num_persisted), mean_age(num_experts, num_snapshot)
    age = from_storage * stored + (1.0 - from_storage) * remembered
    return num_faults * period_steps / total_steps * age


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTimes:
    """Times of one kind of checkpoint.

    Attributes:
        snapshot_s: a copy to host memory.
        persist_s: writing it to storage.
        overlap_s: a forward and backward pass, behind which the copy hides.
        step_s: a step.
    """

    snapshot_s: float
    persist_s: float
    overlap_s: float
    step_s: float

    @property
    def held_s(self) -> float:
        """The time that one checkpoint stops training: O_save = max(0, T_snapshot - T_F&B)."""
        return max(0.0, self.snapshot_s - self.overlap_s)

    @property
    def least_period_steps(self) -> int:
        """The shortest period: one checkpoint is written before the next one begins."""
        return max(1, ceil(self.persist_s / self.step_s))

    def overhead(self, period_steps: int, faults_per_step: float) -> float:
        """Lost time as a share of training: O_save / I + lambda * I / 2, in steps (Eq. 16).

        Partial checkpoints pay where theirs, at their own period, is less than that of full ones.

        Raises:
            ValueError: the period is shorter than writing takes.
        """
        if period_steps < self.least_period_steps:
            raise ValueError(f"{period_steps} steps are over before a checkpoint is written")
        return self.held_s / self.step_s / period_steps + faults_per_step * period_steps / 2.0
