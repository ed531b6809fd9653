"""A small training run of one rank, the same for threads, processes and a rank alone."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Block, ExpertReplica, Layout, ShardRun
from pacekeeper.core.layout.pipeline_schedule import Schedule, pipeline_program
from pacekeeper.trainer.checkpoint.block_states import blocks_on
from pacekeeper.trainer.distributed.collectives import Collectives, LocalFabric
from pacekeeper.trainer.hooks.compute_timers import ComputeTime
from pacekeeper.trainer.toy.engine.job_rules import apportion_rows, own_rows
from pacekeeper.trainer.toy.model.block_state_dict import (
    banks_of,
    ordered_parameters,
    parts_of,
)
from pacekeeper.trainer.toy.model.dataset import Corpus
from pacekeeper.trainer.toy.model.flop_counter import WorkMeter
from pacekeeper.trainer.toy.model.transformer import MoETransformer
from pacekeeper.trainer.toy.parallel import resharding
from pacekeeper.trainer.toy.parallel.grad_reduce import ReplicaSync
from pacekeeper.trainer.toy.parallel.pipeline_runner import InFlightMicrobatch, Scale, StageRun
from pacekeeper.trainer.toy.parallel.stage_p2p import StageP2P
from support.layouts import pipelines_of, with_shares

CONFIG = TrainConfig(
    num_layers=2,
    hidden_size=32,
    num_heads=2,
    expert_hidden_size=48,
    num_experts=5,
    rows_per_step=9,
    row_tokens=96,
    dtype="float64",
)
RANKS = (0, 2, 3, 7)  # with gaps: after deaths, ranks are not positions
FLOAT32 = replace(CONFIG, dtype="float32")
HEADS = replace(CONFIG, num_heads=4)
PAIRS = [(0, 1), (3, 3)], [(2, 2), (7, 2)]  # groups: (rank, heads) of each member


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What to train: step `s` runs on `layouts[s]`, the last one from then on."""

    config: TrainConfig
    layouts: tuple[Layout, ...]
    steps: int


@cache
def alone(config: TrainConfig, steps: int, num_shards: int = 1) -> dict[str, Tensor]:
    """The reference: one rank that holds everything once. To be read only: made once."""
    layout = even_layout(
        ranks=[0],
        num_layers=config.num_layers,
        num_experts=config.num_experts,
        replicas=1,
        num_virtual_shards=num_shards,
    )
    return train(LocalFabric(), Run(config=config, layouts=(layout,), steps=steps))


def train(fabric: Collectives, run: Run) -> dict[str, Tensor]:
    """This rank's parameters after the run, by name, and "losses": one per step, of all ranks."""
    torch.set_num_threads(1)
    config, layout = run.config, run.layouts[0]
    corpus = Corpus.from_stdlib(config)
    model = MoETransformer(config, layout, fabric.rank)
    model.set_layout(layout, fabric)
    sync = ReplicaSync(layout, fabric)
    optimizer = torch.optim.AdamW(ordered_parameters(model), lr=config.learning_rate, foreach=False)
    losses = []
    for step in range(run.steps):
        wanted = run.layouts[min(step, len(run.layouts) - 1)]
        if wanted != layout:
            staged = resharding.stage(model, optimizer, layout, wanted, fabric)
            resharding.swap_in(model, optimizer, staged)
            model.set_layout(wanted, fabric)
            layout, sync = wanted, ReplicaSync(wanted, fabric)
        own_sum = forward_backward(model, corpus, layout, fabric, step)
        sync.synchronise(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(fabric.exchange([own_sum]).sum()) / corpus.target_tokens(step))
    return named_state(model) | {"losses": torch.tensor(losses, dtype=torch.float64)}


def forward_backward(
    model: MoETransformer, corpus: Corpus, layout: Layout, fabric: Collectives, step: int
) -> float:
    """Gradients of this rank's part of its rows, in the configured micro-batches; its sum of the
    loss.
    """
    if fabric.rank in layout.standing_by:
        return 0.0
    config, sums = model.config, [0.0]
    parts = apportion_rows(rows_of(layout, config, fabric.rank), config.num_microbatches)
    program = pipeline_program(
        Schedule(config.schedule),
        num_stages=len(layout.pipeline_of(fabric.rank).stages),
        num_microbatches=config.num_microbatches,
    )

    def is_done(micro: InFlightMicrobatch, compute: ComputeTime | None) -> None:
        assert micro.output is not None
        sums.append(float(micro.output.loss_sum.detach()))

    StageRun(
        model=model,
        program=program.stages[layout.place_of(fabric.rank)[0]],
        crossings=StageP2P.of(layout, fabric),
        scale=Scale(
            targets=corpus.target_tokens(step),
            rows=config.rows_per_step,
            balance_loss=config.balance_loss,
        ),
        meter=WorkMeter(),
        turns=NoTurns(),
        load=lambda number: corpus.batch(step, parts[number]),
        on_done=is_done,
    ).run()
    return sum(sums)


class NoTurns:
    """Nobody asks for times."""

    def begin(self) -> None:
        pass

    def suspend(self) -> object:
        return None

    def resume_suspended(self, aside: object) -> None:
        pass

    def end(self) -> ComputeTime | None:
        return None


def rows_of(layout: Layout, config: TrainConfig, rank: int) -> range:
    """The rows of the global batch that `rank` computes: by the batch shares, in their order."""
    return own_rows(layout, config, rank)


def named_state(model: MoETransformer) -> dict[str, Tensor]:
    """Parameters by names that do not depend on the layout: "layer 0 expert 3/w1"."""
    held = [Block(kind, layer, n) for bank, kind, layer in banks_of(model) for n in bank.held]
    return {
        f"{block}/{name}": part.of(part.parameter.detach()).clone()
        for block in held
        for name, part in parts_of(model, block).items()
    }


def even(ranks: Sequence[int] = RANKS, config: TrainConfig = CONFIG) -> Layout:
    """Two hosts per expert, equal shares."""
    return even_layout(
        ranks=ranks, num_layers=config.num_layers, num_experts=config.num_experts, replicas=2
    )


def skewed(ranks: Sequence[int] = RANKS, config: TrainConfig = CONFIG) -> Layout:
    """All corners at once.

    A rank without rows, one without any expert of the second layer, an expert on one rank, one on
    all, hosts with very unequal shares and with none at all.
    """
    layout = even(ranks, config)
    idle = layout.ranks[-1]
    others = [rank for rank in layout.ranks if rank != idle]
    layers = []
    for layer in range(config.num_layers):
        hosts = list(layout.experts[layer])
        hosts[0] = (ExpertReplica(others[layer % len(others)], 1.0),)
        hosts[1] = tuple(ExpertReplica(rank, 1.0 / len(layout.ranks)) for rank in layout.ranks)
        hosts[2] = (ExpertReplica(others[0], 0.85), ExpertReplica(others[1], 0.15))
        hosts[3] = (ExpertReplica(others[0], 0.0), ExpertReplica(others[-1], 1.0))
        if layer == 1:
            hosts = [
                (ExpertReplica(others[0], 0.4), ExpertReplica(others[1], 0.6))
            ] * config.num_experts
        layers.append(tuple(hosts))
    count = len(layout.ranks)
    shares = [0.0 if i == 1 else 1.0 / (count - 1) for i in range(count)]
    return with_shares(replace(layout, experts=tuple(layers)), *shares)


def in_groups(layout: Layout, *groups: Sequence[tuple[int, int]]) -> Layout:
    """`layout` with tensor groups: (rank, how many virtual shards) of each one's members."""
    runs = []
    for group in groups:
        ends = [sum(count for _, count in group[: i + 1]) for i in range(len(group))]
        runs.append(
            tuple(ShardRun(rank, end - n, end) for (rank, n), end in zip(group, ends, strict=True))
        )
    share = dict(layout.batch_shares)
    shards = sum(count for _, count in groups[0])
    shares = [sum(share[rank] for rank, _ in group) for group in groups]
    return replace(
        layout,
        num_attention_shards=shards,
        num_mlp_shards=shards,
        pipelines=pipelines_of([(0, layout.num_layers, runs)], shares),
    )


def random_layout(seed: int, generation: int = 1, config: TrainConfig = CONFIG) -> Layout:
    """Any hosts, any shares (zero too), any batch shares."""
    draw = random.Random(seed)
    layout = even(RANKS, config)
    layers = []
    for _ in range(config.num_layers):
        hosts = []
        for _ in range(config.num_experts):
            on = sorted(draw.sample(RANKS, draw.randint(1, len(RANKS))))
            hosts.append(
                tuple(ExpertReplica(r, s) for r, s in zip(on, _shares(draw, len(on)), strict=True))
            )
        layers.append(tuple(hosts))
    other = replace(layout, generation=generation, experts=tuple(layers))
    return with_shares(other, *_shares(draw, len(RANKS)))


def _shares(draw: random.Random, count: int) -> list[float]:
    weights = [draw.choice([0.0, 1.0, draw.random()]) for _ in range(count)]
    weights[draw.randrange(count)] += 0.5
    return [weight / sum(weights) for weight in weights]


def assert_same(
    states: dict[int, dict[str, Tensor]], reference: dict[str, Tensor], rtol: float, atol: float
) -> None:
    seen: set[str] = set()
    for rank, state in states.items():
        for name, ours in state.items():
            where = f"{name} on rank {rank}"
            torch.testing.assert_close(ours, reference[name], rtol=rtol, atol=atol, msg=where)
        seen |= set(state)
    assert seen == set(reference), "every part of the model lives somewhere"


def assert_holders_agree(layout: Layout, states: dict[int, dict[str, Tensor]]) -> None:
    """Bit-equal: each block on all that the layout names, and nowhere else."""
    for rank, state in states.items():
        held = {name.partition("/")[0] for name in state} - {"losses"}
        assert held == {str(block) for block in blocks_on(layout, rank)}
    names = {name for state in states.values() for name in state}
    for name in names:
        copies = [state[name] for state in states.values() if name in state]
        assert all(torch.equal(copies[0], copy) for copy in copies[1:]), name
