"""Copies of a block are compared bit by bit; whoever differs is named on every rank alike."""

import pytest
import torch

from pacekeeper.core.errors import CorruptStateError
from pacekeeper.core.layout.layout import Block, BlockKind, Layout
from pacekeeper.trainer.toy.model.block_state_dict import ordered_parameters
from pacekeeper.trainer.toy.model.dataset import Corpus
from pacekeeper.trainer.toy.model.transformer import MoETransformer
from pacekeeper.trainer.toy.parallel.grad_reduce import ReplicaSync
from pacekeeper.trainer.toy.parallel.replica_consistency import (
    PARTS,
    Difference,
    check,
    differences,
)
from support.sabotage import flip_bit
from support.training import CONFIG, RANKS, even, forward_backward, skewed
from support.worlds import ThreadFabric, run_world

CORPUS = Corpus.from_stdlib(CONFIG)


class Trained:
    """One rank after two steps: its model, its optimizer, and its gradients."""

    def __init__(self, fabric: ThreadFabric, layout: Layout) -> None:
        self.fabric, self.layout = fabric, layout
        self.model = MoETransformer(CONFIG, layout, fabric.rank)
        self.model.set_layout(layout, fabric)
        self.optimizer = torch.optim.AdamW(ordered_parameters(self.model))
        sync = ReplicaSync(layout, fabric)
        for step in range(2):
            self.optimizer.zero_grad()
            forward_backward(self.model, CORPUS, layout, fabric, step)
            sync.synchronise(self.model)
            self.optimizer.step()

    def said(self) -> str:
        """What the check says; nothing where all is well."""
        try:
            check(self.model, self.optimizer, self.layout, self.fabric, 1)
        except CorruptStateError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("layout", [even(), skewed()], ids=["even", "skewed"])
def test_what_the_trainer_does_keeps_all_copies_equal(layout: Layout) -> None:
    said = run_world(RANKS, lambda fabric: Trained(fabric, layout).said())
    assert said == dict.fromkeys(RANKS, "")


@pytest.mark.parametrize("part", PARTS)
def test_one_bit_in_one_copy_is_named_on_all_ranks(part: str) -> None:
    layout = even()
    (victim, other) = (host.rank for host in layout.experts[1][3])

    def body(fabric: ThreadFabric) -> str:
        mine = Trained(fabric, layout)
        if fabric.rank == victim:
            bank = mine.model.layers()[1].bank
            slot = bank.held.index(3)
            moments = mine.optimizer.state[bank.w2]
            assert bank.w2.grad is not None
            tensors = (bank.w2, moments["exp_avg"], moments["exp_avg_sq"], bank.w2.grad)
            flip_bit(tensors[PARTS.index(part)].data[slot])
        return mine.said()

    said = set(run_world(RANKS, body).values())
    named = f"layer 1 expert 3: {part} on ranks [{max(victim, other)}] not as on"
    assert len(said) == 1
    (text,) = said
    assert text.startswith(f"after step 1 copies differ: {named} [{min(victim, other)}]; restart")


def test_a_dense_parameter_that_differs_on_one_rank_names_that_rank() -> None:
    def body(fabric: ThreadFabric) -> str:
        mine = Trained(fabric, even())
        if fabric.rank == 2:
            flip_bit(mine.model.head.head)
        return mine.said()

    for text in run_world(RANKS, body).values():
        assert "head: weights on ranks [2] not as on [0, 3, 7]; restart" in text


def expert(layer: int, number: int) -> Block:
    return Block(BlockKind.EXPERT, layer, number)


def test_sides_are_told_from_the_largest_to_the_smallest() -> None:
    block = expert(0, 4)
    sums = {rank: {block: (value, 0, 0, 0)} for rank, value in enumerate((5, 6, 7, 6))}
    (found,) = differences(sums)
    assert found == Difference(block=block, part="weights", sides=((1, 3), (0,), (2,)))
    assert str(found) == "layer 0 expert 4: weights on ranks [0], [2] not as on [1, 3]"


def test_a_block_on_one_rank_only_has_nothing_to_differ_from() -> None:
    assert differences({0: {expert(0, 0): (1, 2, 3, 4)}, 1: {expert(0, 1): (5, 6, 7, 8)}}) == []
