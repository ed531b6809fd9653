"""A store's slots, changed at random, hold what a dictionary of experts holds."""

from importlib.util import find_spec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.layout.layout import Block, BlockKind

if not find_spec("transformers"):
    pytest.skip("needs transformers", allow_module_level=True)

from pacekeeper.trainer.model.blocks import BlockStore
from pacekeeper.trainer.model.initialization import SeededInitialization
from pacekeeper.trainer.model.skeleton import build_skeleton
from support.tiny_models import tiny_config

EXPERTS, SLOTS = 4, 3


@pytest.fixture(scope="module")
def store() -> BlockStore:
    skeleton = build_skeleton(tiny_config("gpt_oss"))
    store = BlockStore(skeleton, num_slots=SLOTS)
    store.materialize([{}, {}], SeededInitialization(skeleton, 0))
    return store


held = st.sets(st.integers(0, EXPERTS - 1), max_size=SLOTS)


@given(changes=st.lists(held, min_size=1, max_size=6), turn=st.integers(0, SLOTS - 1))
def test_slots_hold_the_experts_and_nothing_else(
    store: BlockStore, changes: list[set[int]], turn: int
) -> None:
    store.assign(0, {})
    values: dict[int, float] = {}
    slots: dict[int, int] = {}
    for number, experts in enumerate(changes, 1):
        slots = {expert: slot for expert, slot in slots.items() if expert in experts}
        free = [(slot + turn) % SLOTS for slot in range(SLOTS)]
        for expert in sorted(experts - slots.keys()):
            slots[expert] = next(slot for slot in free if slot not in slots.values())
        store.assign(0, slots)
        values = {expert: values.get(expert, 0.0) for expert in experts}
        for expert in experts:
            block = Block(BlockKind.EXPERT, 0, expert)
            for value in store.read(block).values():
                assert value.eq(values[expert]).all()
            values[expert] = 10.0 * number + expert
            shapes = store.shapes(block)
            store.write(block, {name: torch.full(s, values[expert]) for name, s in shapes.items()})
    for parameter in store.stacked(0).values():
        for slot in range(SLOTS):
            expected = [values[expert] for expert in slots if slots[expert] == slot] or [0.0]
            assert parameter[slot].eq(expected[0]).all()
