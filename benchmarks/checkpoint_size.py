"""Bytes of partial checkpoints, counted as the files they are: of the whole, and of one rank.

Each shape is saved once in full and then for a whole round of turns, one expert of each layer at a
time, by the saver that training uses, every data-parallel rank in turn. State is what MoC-System
counts: weights of 2 bytes, master weights and two moments of 4 each. Hidden size, vocabulary and
positions are divided by --scale, which keeps the proportions. Then what the busiest rank copies at
once where an exact checkpoint is spread over a window. Prints tables, last one line of JSON.

The busiest rank is compared with Megatron-DeepSpeed (MoC-System, section 4): rank 0 writes all
dense weights, expert-parallel group 0 all experts; the optimizer's state is split evenly over the
ranks that have the same weights (ZeRO-2), or not (`replicated`: each has it all, as our trainer).
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pacekeeper.core.checkpoint.manifest import CheckpointId, Manifest, Piece, TokenLedgerState
from pacekeeper.core.checkpoint.partial_experts import longest_save_gap, select_experts
from pacekeeper.core.checkpoint.window_steps import (
    MAX_WINDOW_STEPS,
    block_costs,
    pieces_to_write,
    window_of_steps,
)
from pacekeeper.core.checkpoint.write_plan import assign_writers, cut_pieces
from pacekeeper.core.layout.even_layout import flat_pipelines
from pacekeeper.core.layout.layout import Block, BlockKind, ExpertReplica, Layout
from pacekeeper.trainer.checkpoint.async_writer import Saver, SaveStatus, Snapshot
from pacekeeper.trainer.checkpoint.storage import open_storage

KINDS = {"": torch.bfloat16, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
KINDS["master"] = torch.float32
WEIGHT_BYTES, OPTIMIZER_BYTES = 2, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A GPT of which every other layer has experts; the head is the embedding."""

    name: str
    layers: int
    hidden: int
    experts: int
    vocabulary: int = 50257
    positions: int = 2048

    def scaled(self, scale: int) -> "Shape":
        return Shape(
            name=self.name,
            layers=self.layers,
            hidden=self.hidden // scale,
            experts=self.experts,
            vocabulary=self.vocabulary // scale,
            positions=self.positions // scale,
        )

    def values(self, block: Block) -> int:
        """Weights of a block; biases left out."""
        wide = self.hidden**2
        match block.kind:
            case BlockKind.EMBEDDING:
                return (self.vocabulary + self.positions) * self.hidden
            case BlockKind.HEAD:
                return self.hidden
            case BlockKind.NORM_ROUTER:
                has_experts = block.layer % 2 == 1
                return self.hidden * (2 + (self.experts if has_experts else 0))
            case BlockKind.ATTENTION:
                return 4 * wide
            case BlockKind.DENSE_MLP | BlockKind.EXPERT:
                return 8 * wide

    def layout(self, ranks: int, expert_parallel: int) -> Layout:
        """Data parallel; an expert on one rank of each expert-parallel group."""
        groups = ranks // expert_parallel
        per_rank = self.experts // expert_parallel
        hosts = tuple(
            tuple(
                ExpertReplica(group * expert_parallel + expert // per_rank, 1.0 / groups)
                for group in range(groups)
            )
            for expert in range(self.experts)
        )
        return Layout(
            generation=1,
            num_attention_shards=1,
            num_mlp_shards=1,
            pipelines=flat_pipelines(range(ranks), self.layers),
            experts=tuple(hosts if layer % 2 else () for layer in range(self.layers)),
        )


PAPER = Shape(name="GPT-350M-16E", layers=24, hidden=1024, experts=16)
FIRST_PAPER = Shape(name="GPT-125M-8E", layers=12, hidden=768, experts=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of all files of a full checkpoint and of each partial one of a round, and what the
    busiest rank wrote of each (tensors with their headers).
    """

    full_bytes: int
    partial_bytes: tuple[int, ...]
    busiest_bytes: tuple[int, ...]

    @property
    def fraction(self) -> float:
        """Of the largest partial one."""
        return max(self.partial_bytes) / self.full_bytes

    def over_mean(self, ranks: int) -> float:
        """What the busiest rank wrote over an even share, of the least even partial one."""
        pairs = zip(self.busiest_bytes, self.partial_bytes, strict=True)
        return max(busiest / (size / ranks) for busiest, size in pairs)


@dataclass(kw_only=True)
class Job:
    """A job of one shape that does nothing but save."""

    shape: Shape
    layout: Layout
    directory: Path
    num_saved: int = 1
    _savers: dict[int, Saver] = field(default_factory=dict)
    _before: CheckpointId | None = None

    def save(self, number: int) -> tuple[int, int]:
        """Checkpoint `number`, the first one full: bytes of its files, and of the busiest rank."""
        equal = [[0.0] * len(on) for on in self.layout.experts]
        chosen = select_experts(equal, self.num_saved, number)
        pieces = [
            Piece(block, kind)
            for block in self.layout.blocks()
            if not self._before or block in chosen or block.kind is not BlockKind.EXPERT
            for kind in KINDS
        ]
        whole = {p: self.shape.values(p.block) * KINDS[p.kind].itemsize for p in pieces}
        sizes = cut_pieces(self.layout, whole, {piece: self._rows(piece) for piece in pieces})
        writer_of = assign_writers(self.layout, sizes)
        own = CheckpointId(run_id=1, generation=1, step=number)
        busiest = 0
        for rank in self.layout.ranks:
            mine = {p: dict(self._tensors(p)) for p in sizes if writer_of[p] == rank}
            busiest = max(busiest, self._write(rank, own, mine, frozenset(writer_of.values())))
        self._before = own
        return sum(file.stat().st_size for file in self._folder(own).iterdir()), busiest

    def _folder(self, one: CheckpointId) -> Path:
        return self.directory / one.name

    def _write(
        self,
        rank: int,
        own: CheckpointId,
        pieces: dict[Piece, dict[str, Tensor]],
        everybody: frozenset[int],
    ) -> int:
        root = open_storage(str(self.directory))
        saver = self._savers.setdefault(rank, Saver(root, rank=rank, keep=2))
        saver.save(
            Snapshot(
                id=own,
                layout=self.layout,
                pieces=pieces,
                writers=everybody,
                manifest=partial(
                    Manifest,
                    job="size",
                    id=own,
                    ticket=own.step,
                    num_updates=own.step,
                    last_loss=None,
                    identity={},
                    layout=self.layout,
                ),
                is_sweeper=rank == min(everybody),
                account=TokenLedgerState(),
                base=self._before,
                is_split=True,
            )
        )
        saver.wait()
        (news,) = saver.take_news()
        assert news.outcome is not SaveStatus.FAILED, news.why
        return news.size_bytes

    def _tensors(self, piece: Piece) -> Iterator[tuple[str, Tensor]]:
        name = f"weight.{piece.kind}" if piece.kind else "weight"
        rows = len(piece.rows(self._rows(piece)))
        yield name, torch.zeros((rows, self.shape.hidden), dtype=KINDS[piece.kind])

    def _rows(self, piece: Piece) -> int:
        return self.shape.values(piece.block) // self.shape.hidden


def measure(shape: Shape, layout: Layout, directory: Path) -> Sizes:
    """A full checkpoint, then a whole round of partial ones."""
    job = Job(shape=shape, layout=layout, directory=directory)
    full, _ = job.save(0)
    found = [job.save(number) for number in range(1, 1 + longest_save_gap(shape.experts, 1))]
    return Sizes(
        full_bytes=full,
        partial_bytes=tuple(size for size, _ in found),
        busiest_bytes=tuple(busiest for _, busiest in found),
    )


def window_bytes(shape: Shape, layout: Layout, num_steps: int, *, are_cut: bool) -> list[int]:
    """What the busiest rank copies after each step of a window; large pieces cut, or whole."""
    pieces = [Piece(block, kind) for block in layout.blocks() for kind in KINDS]
    whole = {piece: shape.values(piece.block) * KINDS[piece.kind].itemsize for piece in pieces}
    rows = {piece: shape.values(piece.block) // shape.hidden for piece in pieces}
    found = []
    for at in window_of_steps(layout, block_costs(whole), num_steps).replay(0):
        now = pieces_to_write(at, whole)
        sizes = cut_pieces(layout, now, rows) if are_cut else now
        load = dict.fromkeys(layout.ranks, 0)
        for piece, rank in assign_writers(layout, sizes).items():
            load[rank] += sizes[piece]
        found.append(max(load.values()))
    return found


def baseline_bytes(shape: Shape, layout: Layout, *, is_replicated: bool) -> float:
    """What rank 0 writes of a full checkpoint in Megatron-DeepSpeed; split optimizers evenly."""
    total = 0.0
    for block in layout.blocks():
        holders = layout.holders(block)
        if 0 not in holders:
            continue
        parts = 1 if is_replicated else len(holders)
        total += shape.values(block) * (WEIGHT_BYTES + OPTIMIZER_BYTES / parts)
    return total


def main() -> None:
    """Prints the tables, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="not used: all data is made here")
    parser.add_argument("--scale", type=int, default=8)
    options = parser.parse_args()
    result: dict[str, float] = {}
    table = Table(title=f"one expert of each layer, hidden size / {options.scale}")
    for column in ("shape", "ranks", "experts over", "full MB", "partial MB", "of full %",
                   "busiest MB", "of mean", "of ZeRO-2 %", "of replicated %"):  # fmt: skip
        table.add_column(column, justify="left" if column == "shape" else "right")
    for base, ranks, over in ((PAPER, 8, 8), (PAPER, 16, 16), (PAPER, 16, 8),
                              (FIRST_PAPER, 8, 8), (FIRST_PAPER, 16, 8)):  # fmt: skip
        shape = base.scaled(options.scale)
        layout = shape.layout(ranks, over)
        with tempfile.TemporaryDirectory() as directory:
            sizes = measure(shape, layout, Path(directory))
        busiest = max(sizes.busiest_bytes)
        zero = busiest / baseline_bytes(shape, layout, is_replicated=False)
        replicated = busiest / baseline_bytes(shape, layout, is_replicated=True)
        table.add_row(
            shape.name, str(ranks), str(over), f"{sizes.full_bytes / 1e6:,.1f}",
            f"{max(sizes.partial_bytes) / 1e6:,.1f}", f"{100 * sizes.fraction:.1f}",
            f"{busiest / 1e6:,.2f}", f"x{sizes.over_mean(ranks):.3f}", f"{100 * zero:.1f}",
            f"{100 * replicated:.1f}",
        )  # fmt: skip
        experts = f"size_fraction_{shape.experts}_experts"
        result[experts] = max(result.get(experts, 0.0), sizes.fraction)
        evenness = "busiest_rank_over_mean"
        result[evenness] = max(result.get(evenness, 0.0), sizes.over_mean(ranks))
        if base is FIRST_PAPER:
            result[f"busiest_rank_fraction_zero2_{ranks}_ranks"] = zero
            result[f"busiest_rank_fraction_replicated_{ranks}_ranks"] = replicated
    Console(width=120).print(table)
    result |= windows(options.scale)
    # The trainer that these checkpoints are of has no ZeRO: all ranks hold all dense state.
    result["busiest_rank_fraction"] = max(
        value for name, value in result.items() if "replicated" in name
    )
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))


def windows(scale: int) -> dict[str, float]:
    """The busiest rank after the busiest step of a window, of its part of a full checkpoint."""
    table = Table(title=f"windows, hidden size / {scale}: what the busiest rank copies at once")
    for column in ("shape", "ranks", "experts over", "steps", "of full %", "in whole pieces %"):
        table.add_column(column, justify="left" if column == "shape" else "right")
    result: dict[str, float] = {}
    for base, ranks, over in ((PAPER, 8, 8), (PAPER, 16, 8), (FIRST_PAPER, 16, 8)):
        shape = base.scaled(scale)
        layout = shape.layout(ranks, over)
        (full,) = window_bytes(shape, layout, 1, are_cut=True)
        for steps in (4, MAX_WINDOW_STEPS):
            cut_up, whole = (
                max(window_bytes(shape, layout, steps, are_cut=are_cut)) / full
                for are_cut in (True, False)
            )
            table.add_row(
                shape.name, str(ranks), str(over), str(steps), f"{100 * cut_up:.1f}",
                f"{100 * whole:.1f}",
            )  # fmt: skip
            name = f"window_{steps}_busiest_fraction"
            result[name] = max(result.get(name, 0.0), cut_up)
            name += "_in_whole_pieces"
            result[name] = max(result.get(name, 0.0), whole)
    Console(width=120).print(table)
    return result


if __name__ == "__main__":
    main()
