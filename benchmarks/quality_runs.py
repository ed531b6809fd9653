"""Runs of a small job that lose ranks on the way: alike but for how they save and restore."""

import random
import sysconfig
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.byte_jobs import byte_job, tokenize_bytes, write_model
from benchmarks.quality_ranks import ThreadJob
from pacekeeper.core.checkpoint.partial_experts import LOST_TOKENS_LIMIT, ExpertOrder
from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.layout.layout import BlockKind, ExpertReplica, Layout
from pacekeeper.trainer.parallel.layouts import start_layout

NUM_RANKS, NUM_DEATHS = 2, 4
NUM_LAYERS, NUM_EXPERTS = 2, 8
HELD_OUT = 16  # one document of so many
SCRATCH = "/dev/shm" if Path("/dev/shm").is_dir() else None  # syncs are not what is measured
MODEL = {"num_hidden_layers": NUM_LAYERS, "num_experts": NUM_EXPERTS}
JOB: dict[str, Any] = {
    "job": "quality",
    "steps": 200,
    "rows_per_step": 8,
    "row_tokens": 64,
    "learning_rate": 3e-3,
    "warmup_steps": 20,
    "slots_per_rank": NUM_EXPERTS,
    "checkpoint_period_steps": 2,
    "checkpoints_kept": 2,
    "evaluation_rows": 128,
}


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

    def config(self, base: EngineConfig, directory: str) -> EngineConfig:
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


def deaths(mode: Mode, config: EngineConfig, seed: int) -> tuple[Death, ...]:
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


def split_texts(paths: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """What is trained on, and what is held out: no document of the one is in the other."""
    by_content = {path.read_bytes(): path for path in paths}
    documents = [path for content, path in by_content.items() if content]
    held = documents[::HELD_OUT]
    return [path for path in documents if path not in held], held


def quality_job(folder: Path, **own: Any) -> EngineConfig:
    """The job, whose files are made in `folder`: it trains on the standard library's source."""
    write_model(folder / "model", **MODEL)
    source = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    training, held = split_texts(source)
    tokenize_bytes(training, folder / "tokens.bin")
    evaluation = tokenize_bytes(held, folder / "held.bin")
    return byte_job(folder, **JOB | {"evaluation_data": (str(evaluation),)} | own)


def run(mode: Mode, base: EngineConfig, seed: int) -> Result:
    """A whole run of `mode`."""
    with tempfile.TemporaryDirectory(prefix="pacekeeper-quality-", dir=SCRATCH) as folder:
        config = mode.config(replace(base, seed=seed), f"{folder}/kept")
        baseline = first_layout()
        job = ThreadJob(config=config, layout=baseline, directory=Path(folder))
        after = []
        for death in deaths(mode, base, seed):
            job.train(death.step - job.step)
            die(job, death, mode, baseline)
            after.append(job.loss())
        job.train(config.steps - job.step)
        saves = job.first.checkpoints.partial
        result = Result(
            loss=job.loss(),
            plt=saves.plt_of_run(job.step),
            num_saved=saves.num_saved,
            saved_bytes=job.saved_bytes,
            digest=job.digest(),
            after=tuple(after),
        )
        job.close()
        return result


def first_layout() -> Layout:
    """That of all runs: half of the experts are on two ranks."""
    return half_twice(start_layout([NUM_EXPERTS] * NUM_LAYERS, range(NUM_RANKS)))


def die(job: ThreadJob, death: Death, mode: Mode, baseline: Layout) -> None:
    """Those who are left go on as the trainer does, and are joined by as many on the same layout;
    where nobody is left, all begin anew and resume.
    """
    lost = [b for b in baseline.blocks() if set(baseline.holders(b)) <= set(death.victims)]
    if len(death.victims) < NUM_RANKS:
        job.die(death.victims)
        job.join(death.victims, replace(baseline, generation=job.layout.generation + 1))
    else:
        job.launch_again()
    if mode.is_reset:
        job.reset(block for block in lost if block.kind is BlockKind.EXPERT)
