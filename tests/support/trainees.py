"""Ranks of a trainer without a model, as threads: they train, save, move, die and go back.

The arithmetic is of whole numbers, exact in any order, and every weight takes part in every update:
one wrong step, weight or moment changes all blocks, on any layout.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from pacekeeper.core.config.job import JobConfig
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Block, BlockKind, Layout
from pacekeeper.core.layout.resize.shrink import RecoveryPlan, ReplicationFloor
from pacekeeper.trainer.checkpoint import in_memory
from pacekeeper.trainer.checkpoint.async_writer import SaveResult
from pacekeeper.trainer.checkpoint.block_states import (
    WEIGHTS,
    BlockState,
    Part,
    StateSpec,
    blocks_on,
    read_block,
    state_digest,
)
from pacekeeper.trainer.checkpoint.manager import Checkpoints, Position
from pacekeeper.trainer.elastic.agreement.recovery_decision import RecoverySources, plan_recovery
from pacekeeper.trainer.groups import checked_payload
from pacekeeper.trainer.groups.checked_payload import exchange_values
from pacekeeper.trainer.groups.group import Group, PeerLost, SingleProcess
from pacekeeper.trainer.groups.typed_values import gather_values
from pacekeeper.trainer.parallel.moves import commit_move, stage_move
from support.rank_threads import ThreadGroup, run_ranks

TINY = JobConfig(job="tiny", checkpoint_period_steps=1, checkpoints_kept=2)
T = TypeVar("T")
State = dict[Block, dict[str, Tensor]]
MODULUS = 8191
OPTIMIZER = "optimizer"
_KINDS = {"weight": WEIGHTS, "weight.mean": OPTIMIZER, "weight.square": OPTIMIZER}
_ROWS = {
    BlockKind.EMBEDDING: 64,
    BlockKind.NORM_ROUTER: 1,
    BlockKind.ATTENTION: 8,
    BlockKind.EXPERT: 16,
    BlockKind.HEAD: 48,
}


@contextmanager
def snapshots_cut(ranks: Collection[int]) -> Iterator[None]:
    """What is sent for a snapshot arrives, but at these ranks the connection breaks just then."""
    travel = checked_payload.all_to_all_bytes

    def cut(outgoing: object, lengths: object, group: ThreadGroup) -> object:
        came = travel(outgoing, lengths, group)  # type: ignore[arg-type]
        if group.rank in ranks:
            raise PeerLost("cut")
        return came

    with patch.object(in_memory, "all_to_all_bytes", cut):
        yield


class ExactStates:
    """Blocks of `width` columns, whose optimizer keeps two tensors of each weight."""

    device = torch.device("cpu")
    kinds = (WEIGHTS, OPTIMIZER)

    def __init__(self, layout: Layout, rank: int, width: int) -> None:
        self.num_experts = [len(placed) for placed in layout.experts]
        self.num_updates = 0
        self._width = width
        self.held = {block: self._new(block) for block in blocks_on(layout, rank)}

    def specs(self, block: Block) -> Sequence[StateSpec]:
        shape = _ROWS[block.kind], self._width
        return [StateSpec(name, kind, shape, torch.float64) for name, kind in _KINDS.items()]

    def parts(self, block: Block, kind: str) -> Mapping[str, Part]:
        return {name: Part(t) for name, t in self.held[block].items() if _KINDS[name] == kind}

    def load(
        self, held: Collection[Block], state: Mapping[Block, BlockState], num_updates: int
    ) -> None:
        self.num_updates = num_updates
        self.held = {block: self.held.get(block, {}) for block in held}
        for block, tensors in state.items():
            anything = torch.full((_ROWS[block.kind], self._width), -1.0, dtype=torch.float64)
            self.held[block] = {name: tensors.get(name, anything).clone() for name in _KINDS}
        for tensors in self.held.values():
            for name, kind in _KINDS.items():
                if kind and not num_updates:
                    tensors[name].zero_()

    def update(self, step: int, total: int) -> None:
        """Make the update of a step whose weights add up to `total`, in place."""
        drift = total % MODULUS + 31 * step + 17 * self.num_updates
        for block, state in self.held.items():
            weight, mean, square = (state[name] for name in _KINDS)
            gradient = (3 * weight + drift + _number(block)) % MODULUS
            mean.copy_((5 * mean + gradient) % MODULUS)
            square.copy_((9 * square + gradient * gradient) % MODULUS)
            weight.copy_((weight + mean + 2 * square) % MODULUS)
        self.num_updates += 1

    def _new(self, block: Block) -> dict[str, Tensor]:
        rows = _ROWS[block.kind]
        places = torch.arange(rows * self._width, dtype=torch.float64).view(rows, self._width)
        zeros = {name: torch.zeros_like(places) for name in _KINDS}
        return zeros | {"weight": places + _number(block)}


def _number(block: Block) -> int:
    return 1000 * block.layer + 100 * block.index + len(block.kind)


class Trainee:
    """One rank, at step 0."""

    def __init__(
        self,
        config: JobConfig,
        layout: Layout,
        rank: int,
        *,
        run_id: int = 1,
        first_run_id: int = 1,
        node_of: Mapping[int, int] | None = None,
        width: int = 8,
    ) -> None:
        torch.set_num_threads(1)
        self.config, self.layout, self.rank, self.node_of = config, layout, rank, node_of or {}
        self.step = 0
        self.notes: list[dict[str, object]] = []
        self.states = ExactStates(layout, rank, width)
        self.checkpoints = Checkpoints(
            config,
            rank=rank,
            run_id=run_id,
            first_run_id=first_run_id,
            identity={
                "model.family": "exact",
                "model.state": state_digest(self.states, layout),
                "settings.seed": config.seed,
            },
            states=self.states,
            note=self.notes.append,
        )

    @property
    def position(self) -> Position:
        """Where it stands."""
        return Position(layout=self.layout, step=self.step, ticket=self.step, last_loss=1.5)

    @property
    def own_total(self) -> int:
        """The sum of the weights of which this is the first holder."""
        mine = (b for b in self.states.held if self.layout.holders(b)[0] == self.rank)
        return sum(int(self.states.held[block]["weight"].sum()) for block in mine)

    def resume(self, group: Group) -> None:
        """Go back to where the job left off, if it did."""
        if paths := self.checkpoints.agree_on_start(group):
            self.go_back(paths, self.layout, group)

    def do_step(self, group: ThreadGroup) -> list[SaveResult]:
        """Train a step with the others, and begin what is due; what became of earlier saves."""
        saves = self.checkpoints
        votes = gather_values(saves.own_vote(self.step + 1, self.layout), group)
        saves.receive_votes(votes)
        own = [saves.is_storing, saves.snapshots.is_copying, self.own_total]
        is_storing, is_copying, total = exchange_values(own, group).sum(0).tolist()
        self.update(int(total))
        results = saves.save_if_due(self.position, is_storing=is_storing > 0)
        return results + saves.snapshot_if_due(
            self.position,
            lambda: group.another("snapshots"),
            self.node_of,
            is_copying=is_copying > 0,
        )

    def update(self, total: int) -> None:
        """Commit a step whose weights add up to `total`."""
        self.checkpoints.settle()
        self.states.update(self.step, total)
        self.checkpoints.partial.count(routed(self.step, self.states.num_experts))
        self.step += 1
        self.checkpoints.step_is_over(self.step)

    def go_back(self, paths: Sequence[str], layout: Layout, group: Group) -> None:
        """To the first of `paths` that all ranks of `group` can read."""
        found = self.checkpoints.stage(paths, layout, group)
        self.checkpoints.apply(found)
        self.layout, self.step = layout, found.step

    def move(self, new: Layout, restore: Sequence[str], group: Group) -> None:
        """Go over to `new`; what no rank of `group` holds comes from `restore`."""
        lost = self.checkpoints.stage_lost(restore, self.layout, new, group, self.step)
        refilled = None if lost is None else lost.state
        commit_move(self.states, stage_move(self.states, self.layout, new, group, refilled))
        if lost is not None:
            self.checkpoints.count_lost(lost)
        self.layout = new

    def state(self) -> State:
        """All that training goes on from, copied."""
        return {
            block: {name: tensor.clone() for name, tensor in read_block(self.states, block).items()}
            for block in self.states.held
        }


def routed(step: int, num_experts: Sequence[int]) -> dict[int, list[int]]:
    """Tokens of each expert in a step, by layer: no two experts have as many."""
    return {
        layer: [
            10 + 3 * expert + (7 * step + 5 * layer + 4 * expert) % 3 for expert in range(count)
        ]
        for layer, count in enumerate(num_experts)
    }


class Lone(Trainee):
    """One rank that trains and saves; `run_id` numbers its launches."""

    def __init__(
        self,
        directory: Path,
        config: JobConfig = TINY,
        *,
        run_id: int = 1,
        first_run_id: int = 0,
        num_layers: int = 1,
        num_experts: int = 2,
        width: int = 8,
    ) -> None:
        super().__init__(
            replace(config, checkpoint_dir=config.checkpoint_dir or str(directory)),
            even_layout(ranks=[0], num_layers=num_layers, num_experts=num_experts, replicas=1),
            0,
            run_id=run_id,
            first_run_id=first_run_id or run_id,
            width=width,
        )
        self.group = SingleProcess()

    @property
    def root(self) -> Path:
        return Path(self.config.checkpoint_dir, self.config.job)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.update(self.own_total)

    def save(self) -> None:
        """A checkpoint of now, written to its end."""
        self.checkpoints.receive_votes([self.checkpoints.own_vote(self.step, self.layout)])
        self.checkpoints.save_if_due(self.position, is_storing=False)
        self.checkpoints.close()

    def grow(self, steps: int) -> list[State]:
        """Train and save; the state after each step (none of step 0)."""
        states: list[State] = [{}]
        for _ in range(steps):
            self.train()
            self.save()
            states.append(self.state())
        return states

    def restore(self, *paths: str) -> None:
        """To the newest, or the first of `paths`, that can be read."""
        self.go_back(paths or self.checkpoints.candidates(), self.layout, self.group)

    def names(self) -> list[str]:
        """Directories of checkpoints, newest last."""
        return sorted(path.name for path in self.root.iterdir())


@dataclass(kw_only=True)
class Job:
    """All ranks of `layout`, at step 0 or where the job left off.

    Each is on a node of its own, or as `node_of` says. `run_id` numbers the launches.
    """

    config: JobConfig
    layout: Layout
    node_of: Mapping[int, int] = field(default_factory=dict)
    run_id: int = 1
    ranks: dict[int, Trainee] = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = {rank: self._born(rank) for rank in self.layout.ranks}
        self.run(lambda one, group: one.resume(group))

    @property
    def leader(self) -> Trainee:
        return self.ranks[min(self.ranks)]

    @property
    def step(self) -> int:
        """Steps committed."""
        return self.leader.step

    def run(self, body: Callable[[Trainee, ThreadGroup], T]) -> dict[int, T]:
        """`body` of all ranks, in a group of their own."""
        ranks = sorted(self.ranks)
        found = run_ranks(ranks, lambda group: body(self.ranks[group.rank], group))
        return dict(zip(ranks, found, strict=True))

    def train(self, steps: int, *, waits: bool = True) -> None:
        """So many steps; `waits` for storage and keepers after each, or goes on beside them."""

        def go_on(one: Trainee, group: ThreadGroup) -> None:
            for _ in range(steps):
                one.do_step(group)
                if waits:
                    one.checkpoints.close()
                    exchange_values([1.0], group)  # or another would see it being written
            one.checkpoints.close()

        self.run(go_on)

    def trained(self, steps: int) -> list[State]:
        """Train; the state after each step (none of step 0)."""
        states: list[State] = [{}]
        for _ in range(steps):
            self.train(1)
            states.append(self.state())
        return states

    def die(self, victims: Collection[int], *, replicas: int = 1) -> RecoveryPlan:
        """The `victims` are gone; the others go on as the leader decides."""
        for rank in victims:
            del self.ranks[rank]
        for one in self.ranks.values():
            one.checkpoints.snapshots.leave()
        chosen = plan_recovery(
            self.layout,
            self.ranks,
            generation=self.layout.generation + 1,
            floor=ReplicationFloor(replicas=replicas),
            has_begun=True,
            has_frozen=self.leader.checkpoints.is_replaying(),
            means=RecoverySources(
                sources=self.leader.checkpoints.sources,
                is_partial=self.leader.checkpoints.partial.is_on,
            ),
        )
        self.settle(chosen)
        return chosen

    def join(self, newcomers: Collection[int], new: Layout) -> None:
        """The `newcomers`, which hold nothing that counts, come in; all go over to `new`."""
        witness = self.leader
        for rank in newcomers:
            born = self.ranks[rank] = self._born(rank)
            born.layout, born.step = witness.layout, witness.step
        self.settle(RecoveryPlan(layout=new))

    def settle(self, chosen: RecoveryPlan) -> None:
        """Go on as was decided."""

        def settle(one: Trainee, group: ThreadGroup) -> None:
            if chosen.restore and not chosen.only_lost:
                one.go_back(chosen.restore, chosen.layout, group)
            else:
                one.move(chosen.layout, chosen.restore, group)

        self.layout = chosen.layout
        self.run(settle)

    def state(self) -> State:
        """The blocks of all ranks, which hold the same bits."""
        return together([one.state() for one in self.ranks.values()])

    def _born(self, rank: int) -> Trainee:
        return Trainee(self.config, self.layout, rank, run_id=self.run_id, node_of=self.node_of)


def together(states: Sequence[State]) -> State:
    """The blocks of all ranks, which hold the same bits."""
    whole: State = {}
    for state in states:
        for block, tensors in state.items():
            assert_same(tensors, whole.setdefault(block, tensors), str(block))
    return whole


def same(one: BlockState, other: BlockState) -> bool:
    """Bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def assert_same(one: BlockState, other: BlockState, what: str) -> None:
    """Bit by bit."""
    assert one.keys() == other.keys(), what
    assert not [name for name in one if not torch.equal(one[name], other[name])], what


def assert_all_same(one: State, other: State) -> None:
    assert one.keys() == other.keys()
    for block, tensors in one.items():
        assert_same(tensors, other[block], str(block))


def assert_steps(found: State, states: Sequence[State], step_of: Mapping[Block, int]) -> None:
    """Each block is as after its step, of `states` by step."""
    assert found.keys() == step_of.keys()
    for block, step in step_of.items():
        assert_same(found[block], states[step][block], f"{block} of step {step}")
