"""Training in bfloat16 with one rank, and moves of experts between slots of the device."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.gpu.common import Scale, figure, micro_batch, require, synchronize, wall_s
from benchmarks.gpu.models import add_adamw, engine_of, one_rank
from pacekeeper.core.layout.diff import Transfer
from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.checkpoint.block_states import BlockState, blocks_on, read_block
from pacekeeper.trainer.engine.engine import Engine
from pacekeeper.trainer.engine.memory_budget import MicroBatchShape, memory_budget
from pacekeeper.trainer.parallel.moves import Fetched, fetch_blocks

SPARE_SLOTS = 2
MOST_APART = 1e-2  # of losses in bfloat16, after the same steps with other sums of rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Figures of `train`."""

    steps: int = figure("steps, each on the same micro-batch of random tokens")
    first_loss: float = figure("loss of the first step")
    last_loss: float = figure("loss of the last step")
    largest_norm: float = figure("largest norm of the gradients before clipping")
    step_s: float = figure("median seconds of a step")
    tokens_per_s: float = figure("tokens a second")
    tflops: float = figure("TFLOP/s, by matrix products without attention")
    parameters: int = figure("parameters")
    budget_gib: float = figure("memory that the budget of `launch` estimates, GiB")
    peak_gib: float | None = figure("memory at the peak, GiB")


def train(device: torch.device, scale: Scale) -> Training:
    """Train a few steps on one micro-batch: losses are finite and go down."""
    size = scale.large
    with one_rank(device) as groups:
        engine = engine_of(size, device, groups=groups)
        add_adamw(engine, 3e-4)
        batch = micro_batch(size)
        losses: list[float] = []
        norms: list[float] = []

        def step() -> None:
            result = engine.step([batch])
            losses.append(result.loss.item())
            norms.append(result.grad_norm.item())

        spent = [wall_s(device, step) for _ in range(scale.steps)]
        shape = MicroBatchShape(
            rows=size.rows, row_tokens=size.row_tokens, compute_dtype=torch.bfloat16
        )
        budget = memory_budget(
            engine.skeleton,
            shape,
            num_slots=size.experts,
            used_slots=size.layers * size.experts,
            num_ranks=1,
        )
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        num_parameters = sum(p.numel() for p in engine.model.parameters())
    require(all(map(math.isfinite, (*losses, *norms))), f"losses {losses}, norms {norms}")
    require(losses[-1] < losses[0], f"the loss rose from {losses[0]} to {losses[-1]}")
    step_s = statistics.median(spent[len(spent) // 3 :])
    tokens = size.rows * size.row_tokens
    return Training(
        steps=scale.steps,
        first_loss=losses[0],
        last_loss=losses[-1],
        largest_norm=max(norms),
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        tflops=tokens * size.flops_per_token / step_s * 1e-12,
        parameters=num_parameters,
        budget_gib=budget.total / 2**30,
        peak_gib=None if peak is None else peak / 2**30,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Figures of `move_between_slots`."""

    moved_experts: int = figure("experts moved, of all layers")
    moved_bytes: int = figure("bytes moved: weights and moments")
    is_bit_equal: bool = figure("all blocks equal bit by bit after the move")
    are_free_slots_zero: bool = figure("slots that became free are zero")
    fetch_gb_per_s: float = figure("GB/s of packing, exchange, checksum and unpacking")
    loss_apart: float = figure("relative difference of the losses afterwards to an unmoved twin")


State = dict[Block, dict[str, Tensor]]


def move_between_slots(device: torch.device, scale: Scale) -> Slots:
    """Send experts of each layer through the exchange of one rank, into other slots.

    They travel as in a move between ranks: packed, with a checksum, by an all-to-all of the
    backend. A twin of the engine trains on without the move.
    """
    size = scale.small
    with one_rank(device) as groups:
        engine, twin = (
            engine_of(size, device, groups=groups, num_slots=size.experts + SPARE_SLOTS)
            for _ in range(2)
        )
        for one in (engine, twin):
            add_adamw(one, 1e-4)
            for step in range(2):
                one.step([micro_batch(size, step)])
        before = _state(engine)
        moved = [Block(BlockKind.EXPERT, n, e) for n in range(size.layers) for e in (0, 1)]
        slots_before = [dict(slots) for slots in engine.store.slots]
        to_itself = [Transfer(block=block, source=0, destination=0) for block in moved]

        def fetch() -> Fetched:
            return fetch_blocks(engine.states, to_itself, 1, groups.exchange)

        fetched = fetch()
        spent = [wall_s(device, fetch) for _ in range(5)]
        are_zero = _reload(engine, moved, fetched.arrived)
        require(
            all(
                engine.store.slots[block.layer][block.index]
                != slots_before[block.layer][block.index]
                for block in moved
            ),
            "an expert lies where it lay before",
        )
        is_equal = _all_equal(before, _state(engine))
        # A change of the layout that moves nothing changes nothing either.
        engine.apply(replace(engine.layout, generation=engine.layout.generation + 1))
        is_equal = is_equal and _all_equal(before, _state(engine))
        losses = [
            [one.step([micro_batch(size, step)]).loss.item() for step in (2, 3)]
            for one in (engine, twin)
        ]
    loss_apart = max(abs(a / b - 1.0) for a, b in zip(*losses, strict=True))
    require(is_equal, "a block changed while it was moved")
    require(are_zero, "a slot that became free is not zero")
    require(loss_apart < MOST_APART, f"losses of both engines: {losses}")
    return Slots(
        moved_experts=len(moved),
        moved_bytes=fetched.moved_bytes,
        is_bit_equal=is_equal,
        are_free_slots_zero=are_zero,
        fetch_gb_per_s=fetched.moved_bytes / statistics.median(spent) * 1e-9,
        loss_apart=loss_apart,
    )


def _reload(engine: Engine, moved: list[Block], arrived: Mapping[Block, BlockState]) -> bool:
    """Let experts go and take them again, the last first, so that each gets another slot.

    Returns:
        Whether their slots were zero in between.
    """
    states, held = engine.states, set(blocks_on(engine.layout, 0))
    slots = {(b.layer, engine.store.slots[b.layer][b.index]) for b in moved}
    held -= set(moved)
    ordered = {block: True for block in engine.layout.blocks() if block in held}
    states.load(ordered, {}, states.num_updates)
    are_zero = all(
        not bool(parameter.detach()[slot].any())
        for layer, slot in slots
        for parameter in engine.store.stacked(layer).values()
    )
    for block in reversed(moved):
        held.add(block)
        ordered = {one: True for one in engine.layout.blocks() if one in held}
        states.load(ordered, {block: arrived[block]}, states.num_updates)
    engine.go_back(engine.layout, engine.groups, engine.num_steps)
    return are_zero


def _state(engine: Engine) -> State:
    synchronize(engine.device)
    return {
        block: {name: tensor.clone() for name, tensor in read_block(engine.states, block).items()}
        for block in blocks_on(engine.layout, 0)
    }


def _all_equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[block][name])
        for block, tensors in one.items()
        for name, tensor in tensors.items()
    )
