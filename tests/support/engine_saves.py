"""Engines on ranks that are threads, which save, copy and go back as a job does."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pacekeeper.core.config.job import JobConfig
from pacekeeper.core.layout.layout import Layout
from pacekeeper.trainer.checkpoint.block_reader import Restored
from pacekeeper.trainer.checkpoint.block_states import blocks_on, read_block
from pacekeeper.trainer.checkpoint.manager import Checkpoints, Position
from pacekeeper.trainer.checkpoint.policies.partial_experts import MemoryRestore
from pacekeeper.trainer.groups.checked_payload import exchange_values
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.groups.typed_values import gather_values
from pacekeeper.trainer.parallel.layouts import start_layout
from support.engines import engine_of, micro_batches, rows_of
from support.rank_threads import ThreadGroup, run_ranks
from support.trainees import State, assert_all_same, together

__all__ = ["State", "assert_all_same", "together"]  # they are of any trainer
Optimizers = Callable[..., Sequence[torch.optim.Optimizer]]
SETTINGS = JobConfig(job="engine", steps=100, checkpoint_period_steps=1, peer_timeout_s=60.0)


def adamw(engine: Any) -> Sequence[torch.optim.Optimizer]:
    return [torch.optim.AdamW(engine.parameters(), lr=1e-2, weight_decay=0.1)]


def two(engine: Any) -> Sequence[torch.optim.Optimizer]:
    return [
        torch.optim.SGD(engine.dense_parameters(), lr=1e-2, momentum=0.9),
        torch.optim.AdamW(engine.expert_parameters(), lr=1e-2),
    ]


class SavingEngine:
    """One rank; `run_id` numbers the launches of its job."""

    def __init__(
        self,
        group: ThreadGroup,
        config: JobConfig,
        layout: Layout,
        *,
        family: str = "qwen3_moe",
        run_id: int = 1,
        node_of: Mapping[int, int] | None = None,
        optimizers: Optimizers = adamw,
        **options: Any,
    ) -> None:
        torch.set_num_threads(1)
        self.group, self.config, self.node_of = group, config, node_of or {}
        options = {"num_slots": 4, "max_grad_norm": 0.5} | options
        self.engine = engine_of(family, group, layout=layout, **options)
        for optimizer in optimizers(self.engine):
            self.engine.add_optimizer(optimizer)
        self.checkpoints = Checkpoints(
            config,
            rank=group.rank,
            run_id=run_id,
            first_run_id=1,
            identity=self.engine.fingerprint(data=7),
            states=self.engine.states,
        )
        paths = self.checkpoints.agree_on_start(group)
        if paths:
            self.go_back(paths, layout, group)
        self.began = self.engine.num_steps

    def go_back(self, paths: Sequence[str], layout: Layout, group: ThreadGroup) -> None:
        """To the first of `paths` that all ranks of `group` can read."""
        self.group = group
        found: Restored | MemoryRestore = self.checkpoints.stage(paths, layout, group)
        self.checkpoints.apply(found)
        groups = EngineGroups(exchange=group, gradients=group, control=group, snapshots=group)
        self.engine.go_back(layout, groups, found.step)

    def train(self, until: int) -> None:
        """Up to `until` steps; waits for storage and keepers after each."""
        engine, checkpoints = self.engine, self.checkpoints
        while engine.num_steps < until:
            step = engine.num_steps
            rows = rows_of(step)[engine.rows(len(rows_of(step)))]
            prepared = engine.prepare_step(micro_batches(rows))
            vote = checkpoints.own_vote(step + 1, engine.layout)
            checkpoints.receive_votes(gather_values(vote, self.group))
            is_storing = bool(exchange_values([checkpoints.is_storing], self.group).any())
            checkpoints.settle()
            result = engine.commit_step(prepared)
            checkpoints.partial.count({n: t.tolist() for n, t in result.routed.items()})
            checkpoints.step_is_over(engine.num_steps)
            at = Position(
                layout=engine.layout,
                step=engine.num_steps,
                ticket=engine.num_steps,
                last_loss=result.loss.item(),
            )
            checkpoints.save_if_due(at, is_storing=is_storing)
            checkpoints.snapshot_if_due(
                at, lambda: self.group.another("snapshots"), self.node_of, is_copying=False
            )
            checkpoints.close()
            exchange_values([1.0], self.group)

    def state(self) -> State:
        """All that training goes on from."""
        return {
            block: {n: t.clone() for n, t in read_block(self.engine.states, block).items()}
            for block in blocks_on(self.engine.layout, self.group.rank)
        }


def layout_of(ranks: Sequence[int], replicas: int = 1, layers: Sequence[int] = (4, 4)) -> Layout:
    """The tiny models': two layers with four experts each."""
    return start_layout(layers, ranks, replicas)


def trained(
    layout: Layout,
    until: int,
    *,
    directory: Path | None = None,
    config: JobConfig = SETTINGS,
    **options: Any,
) -> tuple[int, State]:
    """Train a job up to `until` steps; the step it began at, and the state of all ranks."""
    config = replace(config, checkpoint_dir="" if directory is None else str(directory))

    def work(group: ThreadGroup) -> tuple[int, State]:
        one = SavingEngine(group, config, layout, **options)
        one.train(until)
        return one.began, one.state()

    found = run_ranks(layout.ranks, work)
    (began,) = {began for began, _ in found}
    return began, together([state for _, state in found])


def assert_all_close(one: State, other: State, rtol: float = 1e-12) -> None:
    """Of float64; moments of gradients near zero differ by what gradients differ."""
    assert one.keys() == other.keys()
    for block, tensors in one.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(
                tensor, other[block][name], rtol=rtol, atol=1e-12, msg=f"{block} {name}"
            )
