"""What a hook costs the training thread: the bar is 20 us at the 99th percentile, for each hook.

`python -m benchmarks.hook_cost`; about two minutes. Each call is timed as a trainer makes it, after
its own work: the thread has copied memory, more than its core's cache holds. The `with` blocks of
the README are timed where they are entered and where they are left. The loads of a layer of many
experts are a record per 16 of them, and are stated per record. Percentiles are of wall time, with
the clock reads around the call (about 0.1 us) and with whatever else runs here: read them beside
the load, which is printed, and beside BARE, the least that could tell anything: eight bytes into a
mapped page.

After idling (`--idle-s`), or after work that also empties the tables of addresses, every line of
Python is as dear as the machine's memory: that is told apart, below the bar, as "after idling".
"""

import argparse
import hashlib
import json
import mmap
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pacekeeper.agent.rings.collector import RingCollector
from pacekeeper.core.layout.codec import encode_layout
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.telemetry.expert_row_features import rows_over
from pacekeeper.core.telemetry.node_report import PlanFile
from pacekeeper.core.telemetry.records import LOADS_PER_RECORD
from pacekeeper.trainer.hooks import hooks
from pacekeeper.trainer.hooks.compute_timers import ComputeTime

BAR_US = 20.0
NUM_EXPERTS = LOADS_PER_RECORD  # of one layer: what one record holds
MANY_EXPERTS = 256  # of one layer of a large model
MANY_RECORDS = MANY_EXPERTS // LOADS_PER_RECORD
MANY_LOADS = f"expert_loads of {MANY_EXPERTS}, per record"
IDLE_S = 0.0005
ROUNDS = 3  # of all scenarios in turn: what the host does beside them comes and goes
EIGHT_BYTES = bytes(8)
BARE = "(one bare store)"
AFTER_IDLING = "after idling"
NEIGHBOUR_BYTES = 1 << 20  # copied between two calls: with its source, more than a core's L2
JOB = "cost"
LAYOUT = encode_layout(
    even_layout(ranks=range(4), num_layers=4, num_experts=NUM_EXPERTS, replicas=2)
)
Call = tuple[str, Callable[[], object]]


def one_step(pace: hooks.Hooks, step: int) -> Iterator[Call]:
    """The hook calls of one step of a trainer, in order: in `with` blocks, then one by one.

    What each reports is made anew, just before it, as a trainer's clock and router make it.
    """
    yield from in_blocks(pace, step)
    yield "begin_step", lambda: pace.begin_step(step)
    tokens = 1280 + step % 97
    over = rows_over([step % 97 * number for number in range(NUM_EXPERTS)])
    compute = ComputeTime(
        compute_s=0.25 + step * 1e-6,
        cpu_s=0.2 + step * 1e-6,
        run_queue_s=0.01,
        stall_s=0.04,
        wait_s=0.1,
        ended_mono_s=time.monotonic(),
    )
    yield (
        "micro_batch",
        lambda: pace.report_microbatch(
            compute=compute,
            tokens=tokens,
            sum_len_squared=tokens * 40,
            expert_rows=tokens * 8,
            num_active_experts=16,
            rows_over=over,
            num_documents=12,
        ),
    )
    loads = [step % 97 * number for number in range(NUM_EXPERTS)]
    yield "report_expert_loads", lambda: pace.report_expert_loads(0, loads)
    many_loads = [step % 97 * number for number in range(MANY_EXPERTS)]
    yield MANY_LOADS, lambda: pace.report_expert_loads(1, many_loads)
    yield "end_step", lambda: pace.end_step(tokens=5120, loss=2.5)
    yield "offered_plan", pace.offered_plan
    yield "dead_ranks", pace.dead_ranks
    yield (
        "report_plan_applied",
        lambda: pace.report_plan_applied(step=step, generation=1, layout_crc=1),
    )


def in_blocks(pace: hooks.Hooks, step: int) -> Iterator[Call]:
    """The `with` lines of the README: what each does where it is entered and where it is left."""
    entered: list[AbstractContextManager[object]] = []

    def enter(block: AbstractContextManager[object]) -> None:
        block.__enter__()
        entered.append(block)

    def leave() -> None:
        entered.pop().__exit__(None, None, None)

    yield "with loading: in", lambda: enter(pace.loading())
    yield "with loading: out", leave
    yield "with step: in", lambda: enter(pace.step(step))
    tokens = 1280 + step % 97
    yield "with micro_batch_timer: in", lambda: enter(pace.micro_batch_timer(tokens=tokens))
    yield "with waiting: in", lambda: enter(pace.waiting())
    yield "with waiting: out", leave
    yield "with micro_batch_timer: out", leave
    yield "with step: out", leave


def measure(
    pace: hooks.Hooks, num_steps: int, neighbour_bytes: int, idle_s: float = 0.0
) -> dict[str, list[int]]:
    """Nanoseconds of every call, by hook, BARE beside them; of many loads, of one record."""
    page = mmap.mmap(-1, mmap.PAGESIZE)

    def bare() -> None:
        page[:8] = EIGHT_BYTES

    # Written before it is needed: memory that grew with every call would fault inside some of them.
    spent_ns = {name: array("q", [0]) * num_steps for name in (BARE, *run_once(pace))}
    elsewhere, source = bytearray(neighbour_bytes), bytes(neighbour_bytes)
    for step in range(num_steps):
        for name, call in chain([(BARE, bare)], one_step(pace, step)):
            began_ns = time.perf_counter_ns()
            call()
            spent_ns[name][step] = time.perf_counter_ns() - began_ns
            elsewhere[:] = source  # the trainer's own data pushes ours out of the cache
            if idle_s:
                time.sleep(idle_s)
    told = {name: spent.tolist() for name, spent in spent_ns.items()}
    return {**told, MANY_LOADS: [spent // MANY_RECORDS for spent in told[MANY_LOADS]]}


def run_once(pace: hooks.Hooks) -> list[str]:
    """Call every hook once; their names, in order."""
    names = []
    for name, call in one_step(pace, 0):
        call()
        names.append(name)
    return names


def summarise(rounds: Sequence[Sequence[int]]) -> dict[str, float]:
    """Microseconds: of each percentile the median over the rounds, of the maximum the worst."""
    ordered = [sorted(spent_ns) for spent_ns in rounds]

    def at(share: float) -> float:
        return statistics.median(one[round((len(one) - 1) * share)] for one in ordered) / 1e3

    return {
        "p50_us": at(0.5),
        "p99_us": at(0.99),
        "p99.9_us": at(0.999),
        "max_us": max(one[-1] for one in ordered) / 1e3,
    }


def read_rings(directory: Path) -> None:
    """What a node's agent does to the rings, ten times as often as by default. Never returns."""
    collector = RingCollector(directory=directory)
    digest = hashlib.sha256(LAYOUT).digest()
    while True:
        now_s = time.monotonic()
        collector.poll(now_s)
        if (directory / "offer").exists():
            collector.offer_plan(
                PlanFile(job=JOB, generation=2, base_generation=1, data=LAYOUT, sha256=digest)
            )
        if collector.counts.read:
            (directory / "reading").touch()
        time.sleep(0.01)


def with_agent(
    directory: Path,
    num_steps: int,
    neighbour_bytes: int,
    idle_s: float = 0.0,
    *,
    is_offered: bool = False,
) -> dict[str, list[int]]:
    """With a reader on the ring; with a plan that is offered all the time, or none."""
    pace = attach(directory)
    if is_offered:
        (directory / "offer").touch()
    command = [sys.executable, "-m", "benchmarks.hook_cost", "--read", str(directory)]
    reader = subprocess.Popen(command)
    try:
        give_up_s = time.monotonic() + 30.0
        while not (directory / "reading").exists() or is_offered != (
            pace.offered_plan() is not None
        ):
            if reader.poll() is not None or time.monotonic() > give_up_s:
                raise RuntimeError("the reader process did not read the ring")
            pace.end_step(tokens=1)
            time.sleep(0.01)
        return measure(pace, num_steps, neighbour_bytes, idle_s)
    finally:
        reader.kill()
        reader.wait()


def attach(directory: Path) -> hooks.Hooks:
    pace = hooks.attach(job=JOB, rank=0, world_size=4, ring_dir=str(directory))
    pace.set_generation(1)
    return pace


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="../shared/data", help="not used: all data is made here")
    parser.add_argument("--steps", type=int, default=2_000, help="calls of each hook, each round")
    parser.add_argument("--neighbour-bytes", type=int, default=NEIGHBOUR_BYTES)
    parser.add_argument("--idle-s", type=float, default=IDLE_S, help="0: no such scenario")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read is not None:
        read_rings(arguments.read)
    shared_memory = Path("/dev/shm")
    costs: dict[str, dict[str, dict[str, float]]] = {}
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(
        prefix="pacekeeper-cost-", dir=shared_memory if shared_memory.is_dir() else None
    ) as folder:
        size = arguments.steps, arguments.neighbour_bytes, arguments.idle_s
        rounds = [
            {name: run() for name, run in scenarios(Path(folder) / str(number), *size).items()}
            for number in range(ROUNDS)
        ]
    for scenario, hooks_spent in rounds[0].items():
        costs[scenario] = {
            hook: summarise([one[scenario][hook] for one in rounds]) for hook in hooks_spent
        }
    idle = costs.pop(AFTER_IDLING, None)
    worst_us = max(cost["p99_us"] for of in costs.values() for n, cost in of.items() if n != BARE)
    outcome = {
        "bar_p99_us": BAR_US,
        "worst_p99_us": worst_us,
        "is_within_bar": worst_us < BAR_US,
        "calls": arguments.steps,
        "rounds": ROUNDS,
        "neighbour_bytes": arguments.neighbour_bytes,
        "load_before": round(load_before, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "hooks": costs,
        "after_idling": idle,
    }
    show(outcome)
    print(json.dumps(outcome))
    return 0 if worst_us < BAR_US else 1


def scenarios(
    folder: Path, num_steps: int, neighbour_bytes: int, idle_s: float
) -> dict[str, Callable[[], dict[str, list[int]]]]:
    for name in ("absent", "reading", "offering", "idling"):
        (folder / name).mkdir(parents=True)
    size = (num_steps, neighbour_bytes)
    runs = {
        "agent absent": lambda: measure(attach(folder / "absent"), *size),
        "agent reading": lambda: with_agent(folder / "reading", *size),
        "plan waiting": lambda: with_agent(folder / "offering", *size, is_offered=True),
    }
    if idle_s:
        runs[AFTER_IDLING] = lambda: with_agent(folder / "idling", *size, idle_s)
    return runs


def show(outcome: dict[str, Any]) -> None:
    """The table for people."""
    table = Table(
        title=f"cost of a hook call, us ({outcome['rounds']} x {outcome['calls']} calls); load "
        f"{outcome['load_before']} to {outcome['load_after']} on {outcome['cores']} cores"
    )
    for column in ("scenario", "hook", "p50", "p99", "p99.9", "max"):
        table.add_column(column, justify="left" if column in ("scenario", "hook") else "right")
    told = outcome["hooks"] | {AFTER_IDLING: outcome["after_idling"] or {}}
    for scenario, hook_costs in told.items():
        for hook, cost in hook_costs.items():
            table.add_row(scenario, hook, *(f"{value:.1f}" for value in cost.values()))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
