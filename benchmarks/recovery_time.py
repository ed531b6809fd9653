"""From the moment ranks are killed or freeze to the next finished step, beside torchrun's restart.

The same tiny Qwen3-MoE, batches and number of ranks, in turn, on this machine's CPU; nothing is
emulated. pacekeeper: from SIGKILL or SIGSTOP to the first step that the last survivor committed on
the next layout, less the median of a healthy step; a frozen rank may be silent for
`peer_timeout_s`. torchrun: to the first step that the last rank finished after the restart, though
it is one that was done before; its best case: the engine's own steps, each rank's blocks saved to
tmpfs by safetensors every few steps, all ranks restarted on the same node at once.
Prints tables, last one line of JSON; ends with 1 where a bar is missed.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.byte_jobs import byte_job
from benchmarks.rank_processes import bound, exit_on_stop_signals
from benchmarks.timed_ranks import PARTS, TimedRank, parts_of
from pacekeeper.core.config.engine import EngineConfig

FIRST_STEPS = 12  # before the blow
CHECKPOINT_STEPS = 5
PEER_TIMEOUT_S = 4.0
BAR_S, FROZEN_BAR_S, LEAST_RATIO = 0.35, 0.4, 10.0
PATIENCE_S = 180.0
ROOT = Path(__file__).resolve().parents[1]
MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """So many of `num_ranks` are struck at once; every expert has `replicas`."""

    name: str
    num_ranks: int
    num_struck: int
    replicas: int
    number: signal.Signals = signal.SIGKILL
    bar_s: float | None = None  # beyond a healthy step

    @property
    def is_compared(self) -> bool:
        """Whether torchrun has it, too: it does not notice that a rank is frozen."""
        return self.number == signal.SIGKILL


CASES = (
    Case(name="1 of 4 killed", num_ranks=4, num_struck=1, replicas=2, bar_s=BAR_S),
    Case(name="2 of 8 killed", num_ranks=8, num_struck=2, replicas=3),
    Case(
        name="1 of 4 frozen",
        num_ranks=4,
        num_struck=1,
        replicas=2,
        number=signal.SIGSTOP,
        bar_s=PEER_TIMEOUT_S + FROZEN_BAR_S,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """Who is struck, `delay_s` after all have done FIRST_STEPS: at any moment of a step."""

    victims: tuple[int, ...]
    delay_s: float

    @classmethod
    def drawn(cls, draw: random.Random, case: Case) -> "Blow":
        victims = tuple(draw.sample(range(case.num_ranks), case.num_struck))
        return cls(victims=victims, delay_s=draw.uniform(0.0, 0.5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Seconds from the blow until the last survivor had committed its next step.

    `step_s`: the median of steps before it. `parts`: of the last survivor's recovery, by PARTS.
    """

    next_step_s: float
    step_s: float
    parts: Mapping[str, float]

    @property
    def beyond_step_s(self) -> float:
        """What the blow cost beyond a step that is done anyway."""
        return self.next_step_s - self.step_s


def ours(config: EngineConfig, case: Case, blow: Blow, folder: Path) -> Recovery:
    """One job of ours."""
    from support.fleet import Fleet

    with Fleet(
        directory=folder,
        config=config,
        ranks_per_node=case.num_ranks,
        body=TimedRank(),
        has_own_server=True,
    ) as fleet:
        survivors = [rank for rank in fleet.ranks if rank not in blow.victims]
        for rank in fleet.ranks:
            fleet.await_step(FIRST_STEPS, rank)
        time.sleep(blow.delay_s)
        ends_s = [float(line["ended_mono_s"]) for line in fleet.steps(survivors[0])]
        began_s = time.monotonic()
        for rank in blow.victims:
            fleet.signal(rank, case.number)

        def next_steps() -> dict[int, list[dict[str, Any]]]:
            return {r: [s for s in fleet.steps(r) if s["generation"] > 1] for r in survivors}

        fleet.await_(lambda: all(next_steps().values()))
        ended_s = {rank: float(s[0]["ended_mono_s"]) for rank, s in next_steps().items()}
        last = max(ended_s, key=lambda rank: ended_s[rank])
        return Recovery(
            next_step_s=ended_s[last] - began_s,
            step_s=median(b - a for a, b in pairwise(ends_s[1:])),
            parts=parts_of(fleet.run_dir, last, began_s, ended_s[last]),
        )


def theirs(config: EngineConfig, case: Case, blow: Blow, folder: Path) -> float:
    """Seconds from the kill to the first step of the last rank in the next attempt."""
    from support.fleet import write_config

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(case.num_ranks), "--max-restarts", "1"]
    command += ["--monitor-interval", "0.05", "-m", "benchmarks.torchrun_job"]
    command += ["--config", str(write_config(folder / "job.toml", config))]
    command += ["--run-dir", str(folder), "--checkpoint-steps", str(CHECKPOINT_STEPS)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"RES_OPTIONS": "timeout:1 attempts:1"}  # as our launcher does

    def steps(rank: int, attempt: int) -> list[dict[str, Any]]:
        path = folder / f"steps-{rank}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [line for line in found if line["attempt"] == attempt]

    ranks = range(case.num_ranks)
    with (folder / "torchrun.txt").open("w") as log:
        job = subprocess.Popen(bound(*command), stdout=log, stderr=log, env=environment, cwd=ROOT)
    try:
        _await(lambda: all(len(steps(r, 0)) > FIRST_STEPS for r in ranks), job, folder)
        time.sleep(blow.delay_s)
        killed_s = time.monotonic()
        for rank in blow.victims:
            os.kill(steps(rank, 0)[-1]["pid"], signal.SIGKILL)
        _await(lambda: all(steps(r, 1) for r in ranks), job, folder)
        return max(float(steps(r, 1)[0]["ended_mono_s"]) for r in ranks) - killed_s
    finally:
        job.kill()  # its ranks are bound to it
        job.wait()


def _await(is_so: Callable[[], bool], job: subprocess.Popen[bytes], folder: Path) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not is_so():
        if job.poll() is not None or time.monotonic() > give_up_s:
            raise RuntimeError((folder / "torchrun.txt").read_text()[-4000:])
        time.sleep(0.02)


def in_turn(
    case: Case, repeats: int, seed: int, *, is_compared: bool
) -> tuple[list[Recovery], list[float]]:
    """Ours, and torchrun's seconds where they are compared; other victims each time."""
    draw = random.Random(f"{seed}/{case.name}")
    mine, other_s = list[Recovery](), list[float]()
    for _ in range(repeats):
        blow = Blow.drawn(draw, case)
        with _folder() as job, _folder() as one, _folder() as other:
            config = byte_job(
                Path(job),
                job="recovery",
                steps=100_000,
                replicas=case.replicas,
                peer_timeout_s=PEER_TIMEOUT_S,
            )
            mine.append(ours(config, case, blow, Path(one)))
            line = f"{case.name}, ranks {list(blow.victims)}: {mine[-1].next_step_s:.3f} s, "
            line += f"{mine[-1].beyond_step_s:.3f} s beyond a step"
            if is_compared:
                other_s.append(theirs(replace(config, replicas=1), case, blow, Path(other)))
                line += f", torchrun {other_s[-1]:.2f} s"
        print(line, flush=True)
    return mine, other_s


def _folder() -> tempfile.TemporaryDirectory[str]:
    """On tmpfs, where there is one: the best case for checkpoints."""
    where = str(MEMORY) if MEMORY.is_dir() else None
    return tempfile.TemporaryDirectory(prefix="pacekeeper-", dir=where)


def figures_of(mine: Sequence[Recovery], other_s: Sequence[float]) -> dict[str, float]:
    """Seconds of a case by name, medians unless the name says otherwise, and the ratio."""
    beyond_s = [one.beyond_step_s for one in mine]
    found = {
        "next_step_s": median(one.next_step_s for one in mine),
        "step_s": median(one.step_s for one in mine),
        "kill_minus_step_s": median(beyond_s),
        "kill_minus_step_worst_s": max(beyond_s),
    }
    found |= {f"{part}_s": median(one.parts[part] for one in mine) for part in PARTS}
    if other_s:
        ratio = median(other_s) / found["next_step_s"]
        found |= {"torchrun_s": median(other_s), "torchrun_best_s": min(other_s), "ratio": ratio}
    return found


def is_kept(case: Case, figures: Mapping[str, float]) -> bool:
    """Whether a case keeps its bars."""
    is_soon = case.bar_s is None or figures["kill_minus_step_s"] <= case.bar_s
    return is_soon and figures.get("ratio", LEAST_RATIO) >= LEAST_RATIO


def main() -> int:
    """Prints the tables, then one line of JSON; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="../shared/data", help="not used: all data is made here")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="*", choices=[case.name for case in CASES])
    parser.add_argument("--alone", action="store_true", help="without torchrun")
    options = parser.parse_args()
    exit_on_stop_signals()
    sys.path.insert(0, str(ROOT / "tests"))
    table = Table(title="From the blow to the next finished step, in seconds (medians)")
    for column in ("case", "next step", "healthy step", "beyond it", "worst", "bar", "torchrun",
                   "torchrun best", "ratio"):  # fmt: skip
        table.add_column(column, justify="right")
    parts = Table(title="Of it, milliseconds of the last survivor: until it ...")
    for column in ("case", *PARTS):
        parts.add_column(column, justify="right")
    result: dict[str, Any] = {"repeats": options.repeats, "cores": os.cpu_count()}
    loads, kept = [os.getloadavg()[0]], []
    for case in CASES:
        if options.cases and case.name not in options.cases:
            continue
        is_compared = case.is_compared and not options.alone
        figures = figures_of(*in_turn(case, options.repeats, options.seed, is_compared=is_compared))
        loads.append(os.getloadavg()[0])
        kept.append(is_kept(case, figures))
        names = ("next_step_s", "step_s", "kill_minus_step_s", "kill_minus_step_worst_s")
        shown = [f"{figures[name]:.3f}" for name in names]
        shown.append("" if case.bar_s is None else f"{case.bar_s:.2f}")
        rival = ("torchrun_s", "torchrun_best_s", "ratio")
        shown += [f"{figures[name]:.1f}" if name in figures else "" for name in rival]
        table.add_row(case.name, *shown)
        parts.add_row(case.name, *(f"{1e3 * figures[f'{part}_s']:.0f}" for part in PARTS))
        result[case.name.replace(" ", "_")] = {n: round(f, 4) for n, f in figures.items()}
    console = Console(width=110)
    console.print(table)
    console.print(parts)
    print(f"load average meanwhile: {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores")
    result |= {"load_min": round(min(loads), 1), "load_max": round(max(loads), 1)}
    print(json.dumps(result | {"peer_timeout_s": PEER_TIMEOUT_S, "is_met": all(kept)}))
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
