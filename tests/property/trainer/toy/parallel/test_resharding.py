"""Moving expert replicas: bit by bit, with their optimizer state, and training stays exact."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.errors import LostStateError, PacekeeperError
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.grow import grow
from pacekeeper.core.layout.layout import ExpertReplica, Layout
from pacekeeper.core.layout.shrink import ReplicationFloor
from pacekeeper.trainer.distributed import checked_payload
from pacekeeper.trainer.toy.model.block_state_dict import ordered_parameters
from pacekeeper.trainer.toy.model.dataset import Corpus
from pacekeeper.trainer.toy.model.flop_counter import WorkMeter, WorkPass
from pacekeeper.trainer.toy.model.transformer import MoETransformer
from pacekeeper.trainer.toy.parallel import resharding
from pacekeeper.trainer.toy.parallel.grad_reduce import ReplicaSync
from support.examples import examples
from support.worlds import ThreadFabric, ThreadWorld, run_world

CONFIG = TrainConfig(
    num_layers=2, hidden_size=16, num_heads=2, expert_hidden_size=16, num_experts=4,
    rows_per_step=6, row_tokens=48, dtype="float64",
)  # fmt: skip
CORPUS = Corpus.from_stdlib(CONFIG)
RANKS = (0, 1, 2)
FIRST = even_layout(ranks=RANKS, num_layers=2, num_experts=4, replicas=2)


class Worker:
    """One rank: model, optimizer and layout."""

    def __init__(self, fabric: ThreadFabric, layout: Layout) -> None:
        self.fabric, self.layout = fabric, layout
        self.model = MoETransformer(CONFIG, layout, fabric.rank)
        self.optimizer = torch.optim.AdamW(ordered_parameters(self.model), lr=1e-2, foreach=False)

    def steps(self, numbers: range) -> None:
        self.model.set_layout(self.layout, self.fabric)
        sync = ReplicaSync(self.layout, self.fabric)
        counts = self.layout.rows_of(CONFIG.rows_per_step)
        first = sum(count for rank, count in counts.items() if rank < self.fabric.rank)
        rows = range(first, first + counts[self.fabric.rank])
        for step in numbers:
            self.optimizer.zero_grad()
            output = self.model(CORPUS.batch(step, rows), WorkPass(WorkMeter()))
            (output.loss_sum / CORPUS.target_tokens(step)).backward()
            sync.synchronise(self.model)
            self.optimizer.step()

    def move(self, new: Layout) -> int:
        staged = resharding.stage(self.model, self.optimizer, self.layout, new, self.fabric)
        resharding.swap_in(self.model, self.optimizer, staged)
        self.layout = new
        return staged.moved_bytes

    def state(self) -> dict[str, Tensor]:
        """Every tensor that makes up the training state, by name."""
        found: dict[str, Tensor] = {}
        for i, parameter in enumerate(ordered_parameters(self.model)):
            found[f"{i}"] = parameter.detach().clone()
            for name, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{i}.{name}"] = value.clone()
        return found


@st.composite
def placements(draw: st.DrawFn) -> Layout:
    experts = []
    for _ in range(2):
        layer = []
        for _ in range(4):
            on = sorted(draw(st.sets(st.sampled_from(RANKS), min_size=1)))
            layer.append(tuple(ExpertReplica(rank, 1 / len(on)) for rank in on))
        experts.append(tuple(layer))
    return replace(FIRST, generation=2, experts=tuple(experts))


def test_an_identity_move_changes_no_bit() -> None:
    def body(fabric: ThreadFabric) -> None:
        worker = Worker(fabric, FIRST)
        worker.steps(range(3))
        before = worker.state()
        assert worker.move(replace(FIRST, generation=2)) == 0
        after = worker.state()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)

    run_world(RANKS, body)


@settings(max_examples=examples(6), deadline=None)
@given(placements())
def test_training_through_a_move_equals_training_without_it(new: Layout) -> None:
    def moved(fabric: ThreadFabric) -> Worker:
        worker = Worker(fabric, FIRST)
        worker.steps(range(3))
        worker.move(new)
        worker.steps(range(3, 6))
        return worker

    def unmoved(fabric: ThreadFabric) -> Worker:
        worker = Worker(fabric, FIRST)
        worker.steps(range(6))
        return worker

    ours, theirs = run_world(RANKS, moved), run_world(RANKS, unmoved)
    for rank in RANKS:
        for a, b in zip(
            ours[rank].model.dense_parameters(),
            theirs[rank].model.dense_parameters(),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
        for layer, module in enumerate(ours[rank].model.layers()):
            assert module.bank.held == new.experts_on(rank, layer)
            for slot, expert in enumerate(module.bank.held):
                holder = FIRST.experts[layer][expert][0].rank
                bank = theirs[holder].model.layers()[layer].bank
                torch.testing.assert_close(
                    module.bank.w1[slot],
                    bank.w1[bank.held.index(expert)],
                    rtol=1e-9,
                    atol=1e-12,
                )


def test_nothing_is_in_force_before_the_swap() -> None:
    new = replace(
        FIRST,
        generation=2,
        experts=tuple(tuple((ExpertReplica(1, 1.0),) for _ in layer) for layer in FIRST.experts),
    )

    def body(fabric: ThreadFabric) -> None:
        worker = Worker(fabric, FIRST)
        worker.steps(range(2))
        before = worker.state()
        resharding.stage(worker.model, worker.optimizer, FIRST, new, fabric)
        after = worker.state()
        assert all(torch.equal(before[name], after[name]) for name in before)

    run_world(RANKS, body)


def test_a_damaged_block_is_refused() -> None:
    row = torch.arange(4, dtype=torch.float64)
    sealed = checked_payload.pack_with_crc([row])
    assert torch.equal(checked_payload.unpack_checked(sealed, "row").view(torch.float64), row)
    sealed[3] ^= 1
    with pytest.raises(PacekeeperError, match="layer 0 expert 2 arrived damaged"):
        checked_payload.unpack_checked(sealed, "layer 0 expert 2")


def test_a_block_without_living_holder_is_named() -> None:
    alone = replace(
        FIRST,
        experts=tuple(tuple((ExpertReplica(0, 1.0),) for _ in layer) for layer in FIRST.experts),
    )
    with pytest.raises(LostStateError, match="of layer 0 expert 0, layer 0 expert 1"):
        resharding.block_transfers(alone, replace(FIRST, generation=2), living=(1, 2))


def test_a_rank_that_joins_trains_on_as_if_it_had_been_there() -> None:
    """It gets dense weights, moments and the number of updates, too; nothing of its own is kept."""
    newcomers = (5, 7)
    new = grow(FIRST, newcomers=newcomers, generation=2, floor=ReplicationFloor(replicas=2))
    workers = run_world(RANKS, lambda fabric: trained(fabric, range(3)))

    def join(fabric: ThreadFabric) -> Worker:
        worker = workers.get(fabric.rank) or Worker(fabric, FIRST)
        worker.fabric = fabric
        assert worker.move(new) > 0 or fabric.rank in newcomers
        worker.steps(range(3, 6))
        return worker

    joined = run_world(new.ranks, join)
    unmoved = run_world(RANKS, lambda fabric: trained(fabric, range(6)))
    theirs = unmoved[0].state()
    for rank in new.ranks:
        worker, ours = joined[rank], joined[rank].state()
        for i, _ in enumerate(worker.model.dense_parameters()):
            for name in (f"{i}", f"{i}.exp_avg", f"{i}.exp_avg_sq", f"{i}.step"):
                torch.testing.assert_close(ours[name], theirs[name], rtol=1e-9, atol=1e-12)
                assert torch.equal(ours[name], joined[0].state()[name]), "all hold the same bits"


def test_a_rank_that_joins_before_the_first_update_has_no_moments() -> None:
    new = grow(FIRST, newcomers=(3,), generation=2, floor=ReplicationFloor(replicas=2))

    def join(fabric: ThreadFabric) -> dict[str, Tensor]:
        worker = Worker(fabric, FIRST)
        worker.move(new)
        return worker.state()

    states = run_world(new.ranks, join)
    assert states[3].keys() == states[0].keys()
    num_dense = len(Worker(ThreadFabric(ThreadWorld((0,)), 0), FIRST).model.dense_parameters())
    assert all(torch.equal(states[3][f"{i}"], states[0][f"{i}"]) for i in range(num_dense))


def trained(fabric: ThreadFabric, steps: range) -> Worker:
    worker = Worker(fabric, FIRST)
    worker.steps(steps)
    return worker
