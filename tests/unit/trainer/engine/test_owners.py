"""Optimizer state of dense blocks on an owner and a mirror: its memory, and what a death leaves."""

from dataclasses import replace

import pytest
import torch

from pacekeeper.core.errors import LostStateError
from pacekeeper.core.layout.layout import Block, BlockKind, Layout
from pacekeeper.core.layout.resize.shrink import ReplicationFloor, shrink
from pacekeeper.core.layout.state_owners import assign_state_owners
from pacekeeper.trainer.engine.engine import Engine
from pacekeeper.trainer.engine.memory_budget import MicroBatchShape, memory_budget, owned_state
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.model.blocks import Holding
from pacekeeper.trainer.model.skeleton import Skeleton, build_skeleton
from pacekeeper.trainer.parallel.layouts import start_layout, state_sizes
from pacekeeper.trainer.parallel.mesh.subgroup import subgroup
from support.engines import (
    BUILDING,
    ROWS,
    PlainRun,
    adamw,
    engine_of,
    held_tensors,
    micro_batches,
    rows_of,
)
from support.rank_threads import ThreadGroup, run_ranks
from support.tiny_models import tiny_config

CLIP = 0.4
FLOOR = ReplicationFloor(replicas=2)


def model(shards: int = 1) -> Skeleton:
    with BUILDING:
        return build_skeleton(
            tiny_config("qwen3_moe"), num_attention_shards=shards, num_mlp_shards=shards
        )


def layout_of(skeleton: Skeleton, num_ranks: int, tensor_size: int = 1) -> Layout:
    counts = [one.num_experts if one else 0 for one in skeleton.experts]
    layout = start_layout(
        counts,
        range(num_ranks),
        replicas=2,
        tensor_size=tensor_size,
        num_attention_shards=skeleton.num_attention_shards,
        num_mlp_shards=skeleton.num_mlp_shards,
    )
    return assign_state_owners(layout, sizes=state_sizes(skeleton))


def train(engine: Engine, step: int) -> tuple[float, float]:
    places = engine.rows(ROWS)
    result = engine.step(micro_batches(rows_of(step)[places.start : places.stop]))
    return result.loss.item(), result.grad_norm.item()


@pytest.mark.parametrize(("num_ranks", "size", "shards"), [(4, 1, 1), (6, 2, 4)])
def test_a_rank_has_state_of_what_it_owns_and_mirrors(
    num_ranks: int, size: int, shards: int
) -> None:
    skeleton = model(shards)
    layout = layout_of(skeleton, num_ranks, size)
    owned = owned_state(skeleton, layout)
    assert any(one.copied_bytes for one in owned.values()) == (size > 1)

    def work(group: ThreadGroup) -> tuple[int, int]:
        engine = engine_of("qwen3_moe", group, dtype=torch.float32, layout=layout, num_slots=4)
        optimizer = adamw(engine)
        train(engine, 0)
        states = [t for state in optimizer.state.values() for t in state.values()]
        budget = memory_budget(
            skeleton,
            MicroBatchShape(rows=3, row_tokens=10),
            num_slots=4,
            used_slots=0,
            num_ranks=num_ranks,
            holding=Holding.of(layout, group.rank),
            owned=owned[group.rank],
        )
        num_bytes = sum(t.numel() * t.element_size() for t in states)
        assert num_bytes == budget.optimizer
        experts = {id(p) for p in engine.expert_parameters()}
        dense = [s for p, s in optimizer.state.items() if id(p) not in experts]
        return sum(s["exp_avg"].nbytes for s in dense), budget.dense_weights

    sizes = state_sizes(skeleton)
    small = sum(n for b, n in sizes.items() if b.kind is BlockKind.NORM_ROUTER)
    whole = sum(sizes.values()) - small
    kept = [num_bytes for num_bytes, _ in run_ranks(num_ranks, work)]
    assert sum(kept) == 2 * whole + num_ranks * small
    assert max(kept) - small <= 2 * (whole / num_ranks + max(sizes.values()))


def survivors(group: ThreadGroup, dead: set[int]) -> EngineGroups:
    living = subgroup(group, [rank for rank in group.ranks if rank not in dead])
    return EngineGroups(exchange=living, gradients=living, control=living, snapshots=living)


@pytest.mark.parametrize("has_sent", [False, True])
@pytest.mark.parametrize("dead", range(4))
@pytest.mark.usefixtures("wide")
def test_a_rank_that_dies_with_weights_that_it_has_not_sent_loses_nothing(
    dead: int, has_sent: bool
) -> None:
    plain = PlainRun("qwen3_moe", 4, CLIP)
    first = layout_of(model(), 4)
    after = shrink(first, dead=[dead], generation=2, floor=FLOOR)
    assert after.state_owners

    def work(group: ThreadGroup) -> list[tuple[float, float]]:
        engine = engine_of("qwen3_moe", group, layout=first, num_slots=4, max_grad_norm=CLIP)
        adamw(engine)
        found = [train(engine, 0)]
        places = engine.rows(ROWS)
        prepared = engine.prepare_step(micro_batches(rows_of(1)[places.start : places.stop]))
        engine.commit_step(prepared)
        found.append((prepared.result.loss.item(), prepared.result.grad_norm.item()))
        if has_sent:
            engine.send_weights()
        if group.rank == dead:
            return []
        move = engine.prepare_move(after, survivors(group, {dead}))
        engine.commit_move(move)
        return found + [train(engine, step) for step in (2, 3)]

    for rank, found in enumerate(run_ranks(4, work)):
        if rank != dead:
            assert [loss for loss, _ in found] == pytest.approx(plain.losses, rel=1e-11)
            assert [norm for _, norm in found] == pytest.approx(plain.norms, rel=1e-11)


@pytest.mark.usefixtures("wide")
def test_state_of_which_owner_and_mirror_are_dead_is_missed_by_all() -> None:
    first = layout_of(model(), 4)
    head = first.state_owner_by_block[Block(BlockKind.HEAD)]
    with pytest.raises(LostStateError):
        shrink(first, dead=head.ranks, generation=2, floor=FLOOR)
    after = shrink(first, dead=head.ranks, generation=2, floor=FLOOR, is_restored=True)

    def work(group: ThreadGroup) -> bool:
        engine = engine_of("qwen3_moe", group, layout=first, num_slots=4)
        adamw(engine)
        train(engine, 0)
        if group.rank not in head.ranks:
            with pytest.raises(LostStateError):
                engine.prepare_move(after, survivors(group, set(head.ranks)))
        return True

    assert run_ranks(4, work) == [True] * 4


@pytest.mark.usefixtures("wide")
def test_owners_come_and_go_between_steps() -> None:
    plain = PlainRun("qwen3_moe", 3, CLIP)
    owned = layout_of(model(), 4)
    layouts = [replace(owned, state_owners=()), owned, replace(owned, state_owners=())]

    def work(group: ThreadGroup) -> list[float]:
        engine = engine_of("qwen3_moe", group, layout=layouts[0], num_slots=4, max_grad_norm=CLIP)
        optimizer = adamw(engine)
        losses, num_states = [], []
        for step, layout in enumerate(layouts):
            if step:
                engine.apply(replace(layout, generation=step + 1))
            losses.append(train(engine, step)[0])
            num_states.append(len(optimizer.state))
        assert num_states[0] == num_states[2] > num_states[1]
        return losses

    for losses in run_ranks(4, work):
        assert losses == pytest.approx(plain.losses, rel=1e-11)


def test_all_holders_have_the_same_weights_bit_by_bit() -> None:
    layout = layout_of(model(), 4)

    def work(group: ThreadGroup) -> dict[str, torch.Tensor]:
        engine = engine_of("qwen3_moe", group, dtype=torch.float32, layout=layout, num_slots=4)
        adamw(engine)
        for step in range(2):
            train(engine, step)
        return {name: t.clone() for name, expert, t in held_tensors(engine) if expert is None}

    first, *others = run_ranks(4, work)
    for other in others:
        assert all(torch.equal(tensor, other[name]) for name, tensor in first.items())
