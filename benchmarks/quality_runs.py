"""Runs of a small job that lose ranks on the way: alike but for how they save and restore."""

import random
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pacekeeper.core.checkpoint.partial_experts import LOST_TOKENS_LIMIT, ExpertOrder
from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.layout.layout import BlockKind, ExpertReplica, Layout
from pacekeeper.trainer.toy.engine.job_rules import first_layout
from pacekeeper.trainer.toy.model.dataset import Corpus

if TYPE_CHECKING:
    from support.thread_ranks import ThreadRanks

NUM_RANKS, NUM_DEATHS = 2, 4
HELD_OUT = 16  # one row of so many
HELD_ROWS = 128
SCRATCH = "/dev/shm" if Path("/dev/shm").is_dir() else None  # syncs are not what is measured
CONFIG = TrainConfig(
    job="quality",
    steps=200,
    num_layers=2,
    hidden_size=32,
    num_heads=2,
    expert_hidden_size=64,
    num_experts=8,
    replicas=1,
    rows_per_step=8,
    row_tokens=64,
    clock="cpu",
    checkpoint_period_steps=2,
    checkpoints_kept=2,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """How a run saves. `num_saved`: experts of each layer in a checkpoint (0: all); `limit` of
    Dynamic-K; `rarer`: so many times fewer checkpoints, each spread over `window` steps;
    `is_reset`: what is lost begins anew; `dies_whole`: each death is of all ranks.
    """

    name: str
    num_saved: int = 0
    order: ExpertOrder = ExpertOrder.TURN
    limit: float = 0.0
    rarer: int = 1
    window: int = 1
    is_reset: bool = False
    dies_whole: bool = False
    num_deaths: int = NUM_DEATHS

    def config(self, base: TrainConfig, directory: str) -> TrainConfig:
        return replace(
            base,
            checkpoint_dir=directory if self.num_deaths else "",
            checkpoint_period_steps=base.checkpoint_period_steps * self.rarer,
            checkpoint_window_steps=self.window,
            experts_per_checkpoint=self.num_saved,
            expert_order=self.order,
            lost_tokens_limit=self.limit,
        )


FULL = Mode(name="full")
UNDISTURBED = Mode(name="undisturbed", num_deaths=0)
PARTIAL = (
    Mode(name="turn", num_saved=3),
    Mode(name="load", num_saved=3, order=ExpertOrder.LOAD),
    Mode(name="risk", num_saved=3, order=ExpertOrder.RISK),
    Mode(name="dynamic", num_saved=1, limit=LOST_TOKENS_LIMIT),
)
# Steps of a window are done again on the layout it was saved on: another one rounds differently.
EXACT = Mode(name="exact", rarer=2, window=4, dies_whole=True)
CONTROL = Mode(name="reset", is_reset=True)
MODES = (FULL, UNDISTURBED, EXACT, *PARTIAL, CONTROL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The `victims` are gone once `step` steps are committed."""

    step: int
    victims: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Of one run. `loss`: per token, of the text held out; `after`: just after each restore."""

    loss: float
    plt: float
    num_saved: int
    saved_bytes: int
    digest: str
    after: tuple[float, ...]


def half_twice(layout: Layout) -> Layout:
    """Every other expert gets a second host, the next rank: as hot ones have."""
    ranks = layout.ranks

    def hosts(layer: int, expert: int, on: tuple[ExpertReplica, ...]) -> tuple[ExpertReplica, ...]:
        if (layer + expert) % 2:
            return on
        others = (on[0].rank, ranks[(ranks.index(on[0].rank) + 1) % len(ranks)])
        return tuple(ExpertReplica(rank, 0.5) for rank in sorted(others))

    experts = tuple(
        tuple(hosts(layer, expert, on) for expert, on in enumerate(all_on))
        for layer, all_on in enumerate(layout.experts)
    )
    return replace(layout, generation=layout.generation + 1, experts=experts)


def deaths(mode: Mode, config: TrainConfig, seed: int) -> tuple[Death, ...]:
    """One in each of so many even parts of the run, when a first checkpoint has been made: of one
    rank, then of all, and so on. The same steps and victims for all modes.
    """
    draw = random.Random(seed)
    part = config.steps // max(mode.num_deaths, 1)
    first = EXACT.rarer * config.checkpoint_period_steps + EXACT.window  # the latest to be whole
    found, everybody = [], tuple(range(NUM_RANKS))
    for i in range(mode.num_deaths):
        step, victim = draw.randrange(max(i * part, first), (i + 1) * part), draw.choice(everybody)
        is_whole = i % 2 == 1 or mode.dies_whole
        found.append(Death(step=step, victims=everybody if is_whole else (victim,)))
    return tuple(found)


def texts(config: TrainConfig) -> tuple[Corpus, Corpus]:
    """What is trained on, and what is held out: the same for all seeds, and not one document of it
    is in the other.
    """
    some = Corpus.from_stdlib(replace(config, seed=0)).rows[::HELD_OUT][:HELD_ROWS]
    held = {document for row in some for document in row}
    whole = Corpus.from_stdlib(config)
    left = (tuple(d for d in row if d not in held) for row in whole.rows)
    training = replace(whole, rows=tuple(row for row in left if row))
    return training, replace(whole, rows=some, rows_per_step=len(some))


def run(mode: Mode, base: TrainConfig, seed: int) -> Result:
    """A whole run of `mode`."""
    from support.thread_jobs import digest_of, loss_of
    from support.thread_ranks import ThreadRanks

    with tempfile.TemporaryDirectory(prefix="pacekeeper-quality-", dir=SCRATCH) as folder:
        config = mode.config(replace(base, seed=seed), f"{folder}/kept")
        training, held = texts(config)
        baseline = half_twice(first_layout(config, NUM_RANKS))
        job = ThreadRanks(config=config, layout=baseline, corpus=training, directory=Path(folder))
        after = []
        for death in deaths(mode, base, seed):
            job.train(death.step - job.step)
            die(job, death, mode, baseline)
            after.append(loss_of(job, held))
        job.train(config.steps - job.step)
        job.close()
        saves = job.ranks[0].checkpoints.partial
        return Result(
            loss=loss_of(job, held),
            plt=saves.plt_of_run(job.step),
            num_saved=saves.num_saved,
            saved_bytes=job.saved_bytes,
            digest=digest_of(job),
            after=tuple(after),
        )


def die(job: "ThreadRanks", death: Death, mode: Mode, baseline: Layout) -> None:
    """Those who are left go on as the trainer does, and are joined by as many on the same layout;
    where nobody is left, all begin anew and resume.
    """
    from support.thread_jobs import reset

    lost = [b for b in baseline.blocks() if set(baseline.holders(b)) <= set(death.victims)]
    if len(death.victims) < NUM_RANKS:
        job.die(death.victims)
        job.join(death.victims, replace(baseline, generation=job.layout.generation + 1))
    else:
        job.launch_again()
    if mode.is_reset:
        reset(job, (block for block in lost if block.kind is BlockKind.EXPERT))
