"""Experts move with their optimizer state, or not at all."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from pacekeeper.core.errors import ConfigError, CorruptStateError
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import ExpertReplica, Layout, ReplicaSet
from pacekeeper.trainer.groups.group import Pending, SingleProcess
from pacekeeper.trainer.parallel.moves import (
    _checksum,
    _name,
    assign_slots,
    commit_move,
    require_slots,
    stage_move,
)
from support.rank_threads import ThreadGroup, run_ranks

RANKS, LAYERS, EXPERTS, SLOTS = 3, 2, 4, 4


class Store:
    """Stacked experts whose every value tells layer, expert and place."""

    num_slots: int = SLOTS

    def __init__(self, layout: Layout, rank: int) -> None:
        self.slots: list[Mapping[int, int]] = []
        self._stacks: list[dict[str, nn.Parameter]] = []
        for layer in range(LAYERS):
            held = assign_slots({}, layout.experts_on(rank, layer), SLOTS)
            stacks = {"up": torch.zeros(SLOTS, 2, 3), "bias": torch.zeros(SLOTS, 3)}
            for expert, slot in held.items():
                for name, stack in stacks.items():
                    stack[slot] = value_of(layer, expert, name)
            self.slots.append(held)
            self._stacks.append({n: nn.Parameter(stack) for n, stack in stacks.items()})

    def stacked(self, layer: int) -> Mapping[str, nn.Parameter]:
        return self._stacks[layer]

    def assign(self, layer: int, slots: Mapping[int, int]) -> None:
        self.slots[layer] = slots

    def parameters(self) -> list[nn.Parameter]:
        return [p for stacks in self._stacks for p in stacks.values()]


def value_of(layer: int, expert: int, name: str) -> Tensor:
    shape = {"up": (2, 3), "bias": (3,)}[name]
    return 100.0 * layer + 10.0 * expert + torch.arange(torch.Size(shape).numel()).view(shape) + 1.0


def trained(store: Store, layout: Layout, rank: int) -> torch.optim.Optimizer:
    """An optimizer after one step whose moments are those of each expert."""
    optimizer = torch.optim.AdamW(store.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in store.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return optimizer


def assert_holds(store: Store, optimizer: torch.optim.Optimizer, layout: Layout, rank: int) -> None:
    for layer in range(LAYERS):
        assert sorted(store.slots[layer]) == list(layout.experts_on(rank, layer))
        for name, parameter in store.stacked(layer).items():
            moments = optimizer.state[parameter]["exp_avg"]
            free = set(range(SLOTS)) - set(store.slots[layer].values())
            assert not any(parameter[slot].any() or moments[slot].any() for slot in free)
            for expert, slot in store.slots[layer].items():
                value = value_of(layer, expert, name)
                assert torch.equal(parameter[slot], value)
                assert torch.allclose(moments[slot], 0.1 * value)


def any_layout(chosen: random.Random, generation: int) -> Layout:
    base = even_layout(
        ranks=range(RANKS),
        num_layers=LAYERS,
        num_experts=EXPERTS,
        replicas=1,
        generation=generation,
    )

    def replicas() -> ReplicaSet:
        on = sorted(chosen.sample(range(RANKS), chosen.randint(1, RANKS)))
        return tuple(ExpertReplica(rank, 1.0 / len(on)) for rank in on)

    return replace(
        base, experts=tuple(tuple(replicas() for _ in range(EXPERTS)) for _ in range(LAYERS))
    )


@pytest.mark.parametrize("seed", range(4))
def test_after_any_moves_each_rank_holds_its_experts_with_their_state(seed: int) -> None:
    chosen = random.Random(seed)
    layouts = [any_layout(chosen, generation) for generation in range(1, 6)]

    def work(group: ThreadGroup) -> int:
        store = Store(layouts[0], group.rank)
        optimizers = [trained(store, layouts[0], group.rank)]
        moved = 0
        for old, new in pairwise(layouts):
            staged = stage_move(store, optimizers, old, new, group)
            assert_holds(store, optimizers[0], old, group.rank)
            before = [dict(held) for held in store.slots]
            commit_move(store, optimizers, staged)
            assert_holds(store, optimizers[0], new, group.rank)
            for was, now in zip(before, store.slots, strict=True):
                assert all(was[e] == now[e] for e in was.keys() & now.keys())
            moved += staged.moved_bytes
        return moved

    assert sum(run_ranks(RANKS, work)) > 0


class BadLink(ThreadGroup):
    """Flips one bit of the rows that arrive at rank 1."""

    bit = 0

    def all_to_all_rows(
        self, output: Tensor, rows: Tensor, receive: Sequence[int], send: Sequence[int]
    ) -> Pending:
        done = super().all_to_all_rows(output, rows, receive, send)
        done.wait()
        if self.rank == 1 and len(output):
            output[self.bit // 8 % len(output)] ^= 1 << self.bit % 8
        return SingleProcess().all_reduce(output)


@pytest.mark.parametrize("bit", [0, 7, 63, 64, 127, 500])
def test_a_changed_bit_stops_the_move_on_all_ranks_before_anything_changes(
    bit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = random.Random(0)
    old, new = any_layout(chosen, 1), any_layout(chosen, 2)
    monkeypatch.setattr(BadLink, "bit", bit)

    def work(group: ThreadGroup) -> bool:
        store = Store(old, group.rank)
        optimizer = trained(store, old, group.rank)
        bad = BadLink(group._hub, group.rank, RANKS)
        with pytest.raises(CorruptStateError):
            stage_move(store, [optimizer], old, new, bad)
        assert_holds(store, optimizer, old, group.rank)
        return True

    assert run_ranks(RANKS, work) == [True] * RANKS


def test_the_checksum_tells_exchanged_missing_and_sign_flipped_words() -> None:
    name, other = (_name(2, 1, expert, torch.device("cpu")) for expert in (0, 1))
    data = torch.tensor([1.5, -1.5, 0.25, 7.0], dtype=torch.float64)

    def told(values: torch.Tensor, of: torch.Tensor = name) -> int:
        return int(_checksum(values.view(torch.uint8), of))

    assert told(data) != told(data[[1, 0, 2, 3]])
    assert told(data) != told(data * torch.tensor([-1.0, -1.0, 1.0, 1.0]))
    assert told(data) != told(data, other)
    assert told(torch.zeros(4, dtype=torch.float64)) != 0
    assert told(data) == told(data.clone())


def test_a_layout_that_needs_more_slots_is_rejected_before_anything_moves() -> None:
    layout = any_layout(random.Random(0), 7)
    most = max(len(layout.experts_on(r, layer)) for r in range(RANKS) for layer in range(LAYERS))
    require_slots(layout, most)
    with pytest.raises(ConfigError):
        require_slots(layout, most - 1)


def test_what_stays_keeps_its_slot() -> None:
    assert assign_slots({5: 2, 1: 0}, [1, 3, 4], 4) == {1: 0, 3: 1, 4: 2}
    with pytest.raises(ValueError):
        assign_slots({}, [1, 2, 3], 2)
