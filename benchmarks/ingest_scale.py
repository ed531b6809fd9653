"""What does a fleet of 10,000 agents cost the controller, and how soon is it back after a storm?

`python -m benchmarks.ingest_scale`; six minutes, two cores. The real `pacekeeper controller` on one
core, over real gRPC on loopback, and on the other a swarm of agents, each with a connection of its
own, that report at the interval which the controller sets for so many: their kernels, devices every
five seconds, and the records of eight ranks at each step of their job. The swarm is a C program,
built by the machine's compiler (`cc`). Measured, once the steps of all jobs are judged: CPU time of
the ingest process and of the controller, in cores, and how long a newcomer waits for its welcome.
Then two storms: all connections break at once; the controller is killed and started again while the
agents go on. Of the first attachment and of each storm: CPU seconds of the ingest process, the
controller and the swarm until all are back.

Reports are counted by their numbers: `missed` is a gap in those that one start of the controller
took in. That cannot see what a kill loses, so every tenth agent reports a killed rank of a job of
its own about the kill: before it, while the controller is away, or after. At the end the store must
have one incident for each of these jobs, `lost` and `doubled` are those with none and with more.

Ends with code 1 where a report was missed or not acknowledged; a killed rank was lost or doubled;
agents were not back within 60 s; less than 0.95 of the reports made were taken in meanwhile; or
both processes took 0.95 of their core (more of it cannot be seen), or half of it with 1,000 agents
or fewer.
"""

import argparse
import contextlib
import json
import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import fleet_pki
from benchmarks.fleet_swarm import FleetSwarm, library, names_of
from pacekeeper.controller.ingest.report_pacing import pacing_for
from pacekeeper.core.config.controller import ControllerConfig

CONTROLLER_CORE, SWARM_CORE = 0, 1
BAR_CORE, SMALL_BAR_CORE, SMALL = 0.95, 0.5, 1000  # both processes; of so many agents at most
BACK_WITHIN_S = 60.0
KEPT_UP = 0.95  # of the reports that were made meanwhile: else they pile up
STORMS = ("attach", "connections_break", "controller_killed")
SETTLE_S = 12.0
DETECTOR = ControllerConfig().detector
WARM_STEPS = DETECTOR.skip_steps + DETECTOR.warmup_steps + 2  # until all jobs' steps are judged
LOSS_EVERY, LOSS_REPORTS = 10, 4  # agents with a killed rank, told in one of so many reports
AWAY_S = 5.0  # how long the controller is gone in the second storm
PATIENCE_S = 120.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
FLAGS = ["-m", "pacekeeper.cli.main", "controller"]


class Controller:
    """The controller under test, on its core; `take` gives what it says of itself."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._folder, self._arguments = folder, arguments
        self.address = ("127.0.0.1", free_port(20000))
        self.api = f"127.0.0.1:{free_port(22000)}"
        self._metrics = f"127.0.0.1:{free_port(25000)}"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Until it listens."""
        command = [
            *(sys.executable, *FLAGS),
            *("--listen", f"{self.address[0]}:{self.address[1]}"),
            *("--api-listen", self.api),
            *("--store", str(self._folder / "store.sqlite")),
            *("--metrics-listen", self._metrics, *self._arguments),
        ]
        with (self._folder / "controller.log").open("a") as log:
            os.sched_setaffinity(0, {CONTROLLER_CORE})  # its processes inherit it
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
            os.sched_setaffinity(0, {SWARM_CORE})
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("listening on"), (self._folder / "controller.log").read_text()

    def stored_deaths(self) -> Counter[str]:
        """Incidents of killed ranks in its store, by job."""
        store = f"file:{self._folder / 'store.sqlite'}?mode=ro"
        with contextlib.closing(sqlite3.connect(store, uri=True)) as connection:
            what = "SELECT job FROM incidents WHERE kind = 'death'"
            return Counter(job for (job,) in connection.execute(what))

    @property
    def log(self) -> Path:
        """What it said."""
        return self._folder / "controller.log"

    def kill(self) -> None:
        """As a power cut would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def processes(self) -> dict[str, int]:
        """Its processes: what each is, and its pid."""
        assert self._process is not None
        found = {"controller": self._process.pid}
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                pid, parent = _stat(entry)[0], _stat(entry)[1]
                if int(parent) == self._process.pid:
                    found["ingest"] = int(pid)
        return found

    def spent_s(self) -> dict[str, float]:
        """CPU seconds of each, kernel and user."""
        spent = {}
        for name, pid in self.processes().items():
            fields = _stat(Path(f"/proc/{pid}/stat"))
            spent[name] = (int(fields[2]) + int(fields[3])) / TICKS_PER_S
        return spent

    def memory_bytes(self) -> dict[str, int]:
        """Resident memory of each."""
        found = {}
        for name, pid in self.processes().items():
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            found[name] = pages * os.sysconf("SC_PAGE_SIZE")
        return found

    def unlabelled_metrics(self) -> dict[str, float]:
        """Its series without labels."""
        with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=30.0) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line[0] != "#" and "{" not in line)
        return {name: float(value) for name, value in pairs}


def _stat(path: Path) -> tuple[str, str, str, str]:
    """(pid, parent, user ticks, kernel ticks)."""
    pid, _, rest = path.read_text().partition(" (")
    fields = rest.rpartition(") ")[2].split()
    return pid, fields[1], fields[11], fields[12]


def free_port(first: int) -> int:
    """Below the range that clients' connections take theirs from."""
    for port in range(first + os.getpid() % 1000, first + 5000):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[Controller]:
    """A controller of a fresh store; killed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        controller = Controller(Path(folder), *arguments)
        controller.start()
        try:
            yield controller
        finally:
            controller.kill()
            if os.environ.get("KEEP_LOG"):
                sys.stderr.write((Path(folder) / "controller.log").read_text()[-4000:])


def quantile(values: list[float], share: float) -> float:
    """Of those that were seen; NaN of none."""
    return (
        sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")
    )


def measure(controller: Controller, swarm: FleetSwarm, for_s: float) -> dict[str, Any]:
    """The steady state: shares of a core, waits, reports taken in."""
    swarm.begin_anew()
    before, told, own_s = controller.spent_s(), controller.unlabelled_metrics(), time.process_time()
    made = swarm.counts.made
    took_s = swarm.run(for_s)
    after, then = controller.spent_s(), controller.unlabelled_metrics()
    made = swarm.counts.made - made
    taken = then["pacekeeper_reports_total"] - told["pacekeeper_reports_total"]
    cores = {name: (after[name] - before[name]) / took_s for name in after}
    return {
        "measured_s": took_s,
        "reports": made,
        "core": cores,
        "core_of_both": sum(cores.values()),
        "us_per_report": {name: (after[name] - before[name]) / taken * 1e6 for name in after},
        "swarm_core": (time.process_time() - own_s) / took_s,
        "swarm_late_s": swarm.counts.late_s,
        "welcome_p50_s": quantile(swarm.probes, 0.5),
        "welcome_max_s": max(swarm.probes, default=float("nan")),
        "waiting": swarm.num_waiting,
        "rss_bytes": controller.memory_bytes(),
        "taken": taken,
    }


def sequences(controller: Controller) -> dict[str, float]:
    """Reports that never came, by the gaps in their numbers, and that came again (passed over)."""
    told = controller.unlabelled_metrics()
    return {name: told[f"pacekeeper_reports_{name}_total"] for name in ("missed", "repeated")}


def is_met(result: dict[str, Any]) -> bool:
    """Are the bars kept: processor time, nobody lost, nothing lost?"""
    storms, steady = [result[name] for name in STORMS], result["steady"]
    bar_core = SMALL_BAR_CORE if result["agents"] <= SMALL else BAR_CORE
    return (
        steady["core_of_both"] < bar_core
        and steady["taken"] >= KEPT_UP * steady["reports"]
        and result["killed_ranks"]["asked"] > 0
        and result["killed_ranks"]["lost"] == result["killed_ranks"]["doubled"] == 0
        and all(one["are_back"] and one["all_acknowledged"] for one in storms)
        and all(one["back_s"] <= BACK_WITHIN_S for one in storms)
        and all(one["missed"] == 0 for one in storms)
    )


def storm(controller: Controller, swarm: FleetSwarm) -> dict[str, Any]:
    """From the moment all are away until all are back and all they kept is acknowledged."""
    counts = swarm.counts
    counts.broken = counts.refused = 0
    swarm.begin_anew()
    kept = swarm.num_waiting

    before, own_s = controller.spent_s(), time.process_time()
    back_s = swarm.run(PATIENCE_S, until=lambda: swarm.are_welcome)
    after, own_s = controller.spent_s(), time.process_time() - own_s
    swarm.mark()
    swarm.run(PATIENCE_S, until=lambda: swarm.num_behind == 0)

    return {
        "kept_reports": kept,
        "back_s": back_s,
        "are_back": swarm.are_welcome,
        "cpu_s": {name: after[name] - before[name] for name in after} | {"swarm": own_s},
        "all_acknowledged": swarm.num_behind == 0,
        "broken_streams": counts.broken,
        "refused_connections": counts.refused,
        "welcome_p99_s": quantile(swarm.welcomes, 0.99),
        **sequences(controller),
    }


def killed_ranks(
    controller: Controller, swarm: FleetSwarm, jobs: Sequence[str], known: Counter[str]
) -> dict[str, int]:
    """How many of these jobs the store has, once all that was told is acknowledged."""
    swarm.mark()
    swarm.run(PATIENCE_S, until=lambda: swarm.num_behind == 0)
    stored = controller.stored_deaths()
    return {
        "asked": len(jobs),
        "stored_before_the_kill": len(known),
        "lost": sum(not stored[job] for job in jobs),
        "doubled": sum(stored[job] > 1 for job in jobs),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="not used: all reports are made here")
    parser.add_argument("--agents", type=int, default=10_000)
    parser.add_argument("--nodes-per-job", type=int, default=100)
    parser.add_argument("--step-s", type=float, default=10.0, help="seconds of a step")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--tls", action="store_true", help="each agent shows its own certificate")
    parser.add_argument("arguments", nargs="*", help="more for `pacekeeper controller`, after --")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        secure: tuple[str, ...] = ()
        if options.tls:
            secure = ("--config", str(fleet_pki.made(folder, names_of(options.agents))))
        controller = stack.enter_context(running(*secure, *options.arguments))
        pacing = pacing_for(options.agents)
        interval_s = pacing.report_interval_s
        step_every = max(1, round(options.step_s / interval_s))
        swarm = FleetSwarm(
            library(folder, has_tls=options.tls),
            controller.address[1],
            options.agents,
            nodes_per_job=options.nodes_per_job,
            step_every=step_every,
            interval_s=interval_s,
            spread_s=pacing.reconnect_spread_s,
        )
        if options.tls:
            swarm.speak_tls(folder / "ca.crt", folder)
        swarm.attach_within(max(2.0, pacing.reconnect_spread_s))
        result: dict[str, Any] = {
            "agents": options.agents,
            "interval_s": interval_s,
            "attach": storm(controller, swarm),
        }
        swarm.run(SETTLE_S + WARM_STEPS * step_every * interval_s)
        result["steady"] = measure(controller, swarm, options.seconds)
        print(json.dumps(result), file=sys.stderr, flush=True)
        swarm.drop_all()
        result["connections_break"] = storm(controller, swarm)
        swarm.run(SETTLE_S)
        jobs = swarm.lose_ranks(LOSS_EVERY, LOSS_REPORTS)
        swarm.run(LOSS_REPORTS / 2 * interval_s)
        known = controller.stored_deaths()
        controller.kill()
        swarm.run(AWAY_S)
        controller.start()
        result["controller_killed"] = storm(controller, swarm)
        swarm.run(LOSS_REPORTS * interval_s)
        result["killed_ranks"] = killed_ranks(controller, swarm, jobs, known)
        swarm.close()
    table = Table(title=f"{options.agents:,} agents, a report each {interval_s:g} s")
    table.add_column("what")
    table.add_column("measured", justify="right")
    for part, values in result.items():
        for name, value in values.items() if isinstance(values, dict) else ():
            table.add_row(
                f"{part} {name}", f"{value:.3f}" if isinstance(value, float) else str(value)
            )
    Console(width=140).print(table)
    result["is_met"] = is_met(result)
    print(json.dumps(result))
    return 0 if result["is_met"] else 1


if __name__ == "__main__":
    sys.exit(main())
