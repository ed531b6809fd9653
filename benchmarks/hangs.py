"""Whether ranks that hang are named, how soon, and whether healthy ranks are left alone.

Real processes: ranks of a plain DDP job on gloo (`benchmarks.hung_ranks`), agent, controller. For
each kind of fault and length of a step: is the incident about the struck rank (or the job, where no
rank is at fault), after how long, in seconds and in usual phase times (the pass takes most of a
step), with a stack dump by what. A read that blocks counts from its call. Then
healthy jobs, in which nothing may be named: random stalls below the limit, evaluations and
checkpoints on rank 0 for which all others wait, a pause of the whole job.
`python -m benchmarks.hangs`; prints a table, last one line of JSON.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.hung_ranks import BETWEEN, IN_PASS, JOB, LOOP, MISMATCH
from benchmarks.rank_processes import exit_on_stop_signals
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.protos import status_pb2

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.controllers import ControllerProcess
from support.stuck_mount import StuckMount, can_mount

SIZE, CULPRIT = 3, 1
WARM_STEPS = 8
PATIENCE_S = 240.0
LIMIT_S = 2.0  # and twice the usual phase time: the bar
AHEAD_S = 1.0  # of the ranks, at which storage is made to block
STOP, READ, READ_ALL = "sigstop", "storage", "storage_all"
KINDS = (IN_PASS, BETWEEN, LOOP, STOP, READ, READ_ALL, MISMATCH)
OF_JOB = (READ_ALL, MISMATCH)  # no rank is at fault
AGENT = """
[agent]
controller = "{controller}"
node = "node-0"
ring_dir = "{rings}"
metrics_listen = ""
"""


@dataclass(kw_only=True)
class HangJob:
    """A job, its agent and its controller; use as a context manager."""

    folder: Path
    step_s: float
    options: tuple[str, ...] = ()
    mount: StuckMount | None = None
    _ends: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    ranks: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def __enter__(self) -> "HangJob":
        with self._ends:
            (self.folder / "faults").mkdir(parents=True)
            for rank in range(SIZE):
                self.data(rank).mkdir()
                (self.data(rank) / "item").write_bytes(b"data")
            self.controller = self._ends.enter_context(
                ControllerProcess(self.folder, is_fresh=True)
            )
            config = self.folder / "agent.toml"
            config.write_text(
                AGENT.format(controller=self.controller.address, rings=self.folder / "rings")
            )
            log = self._ends.enter_context((self.folder / "processes.log").open("wb"))
            command = [sys.executable, "-m", "pacekeeper.cli.main", "agent", "--config"]
            agent = subprocess.Popen([*command, str(config)], stdout=log, stderr=log)
            self._ends.callback(_end, agent, signal.SIGTERM)
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            for rank in range(SIZE):
                command = [sys.executable, "-m", "benchmarks.hung_ranks", "--rank", str(rank)]
                command += ["--size", str(SIZE), "--port", str(port), "--folder", str(self.folder)]
                command += ["--step-s", str(self.step_s), *self.options]
                self.ranks.append(
                    subprocess.Popen(
                        command,
                        stdout=log,
                        stderr=log,
                        env=os.environ | {"OMP_NUM_THREADS": "1"},
                        cwd=Path(__file__).resolve().parents[1],
                    )
                )
                self._ends.callback(_end, self.ranks[-1], signal.SIGKILL)
            wait_for("the job trains", lambda: self.steps() >= WARM_STEPS and self.is_watched())
            self._ends = self._ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        if self.mount is not None:
            self.mount.release()
        self._ends.close()

    def data(self, rank: int) -> Path:
        """Where a rank reads its data."""
        return self.folder / f"data-{rank}"

    def steps(self) -> int:
        """Steps that all ranks have done."""
        paths = [self.folder / f"steps-{rank}" for rank in range(SIZE)]
        return min(int(path.read_text() or 0) if path.exists() else 0 for path in paths)

    def is_watched(self) -> bool:
        """Whether the controller knows the job."""
        jobs = self.controller.status.ListJobs(status_pb2.ListJobsRequest(), timeout=30.0).jobs
        return bool(jobs)

    def strike(self, kind: str) -> float:
        """Let the fault begin; return when it did, in Unix seconds."""
        if kind == STOP:
            os.kill(self.pid(CULPRIT), signal.SIGSTOP)
            return time.time()
        if kind in (READ, READ_ALL):
            # All ranks meet it in the same step: a rank that meets it alone is rightly named.
            step = self.steps() + 3 + int(AHEAD_S / self.step_s)
            for rank in range(SIZE) if kind == READ_ALL else [CULPRIT]:
                self.block(self.data(rank) / f"item-{step}")
            return time.time()
        (self.folder / "faults" / f"{kind}-{CULPRIT}").touch()
        struck = self.folder / "faults" / f"struck-{CULPRIT}"
        wait_for("the fault begins", lambda: struck.exists() and struck.read_text() != "")
        return float(struck.read_text())

    def resume(self) -> None:
        """Let a stopped rank go on."""
        os.kill(self.pid(CULPRIT), signal.SIGCONT)

    def block(self, path: Path) -> None:
        """Let reads of a file block: on a mount whose server does not answer, or in a pipe."""
        if self.mount is not None:
            path.symlink_to(self.mount.file)
        else:
            os.mkfifo(path)

    def pid(self, rank: int) -> int:
        """The process of a rank."""
        ring = self.folder / "rings" / JOB / shm_ring.ring_file_name(rank)
        return shm_ring.decode_header(ring.read_bytes()).pid

    def hangs(self) -> list[Any]:
        """The incidents of hangs, oldest first."""
        request = status_pb2.ListIncidentsRequest(job=JOB)
        found = self.controller.status.ListIncidents(request, timeout=30.0).incidents
        return sorted((i for i in found if i.kind == "hang"), key=lambda i: i.incident_id)

    def stacks(self, incident_id: int, patience_s: float = 20.0) -> list[Any]:
        """The stacks that `pacekeeper explain` shows of an incident, once they have come."""
        request = status_pb2.GetExplanationRequest(incident_id=incident_id)
        stacks: list[Any] = []

        def have_come() -> bool:
            found = self.controller.status.GetExplanation(request, timeout=30.0)
            stacks[:] = found.explanation.stacks
            return bool(stacks)

        with contextlib.suppress(TimeoutError):
            wait_for("a stack", have_come, patience_s)
        return stacks


def _end(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)
    process.wait()


def wait_for(what: str, is_so: Any, patience_s: float = PATIENCE_S) -> None:
    """Wait until `is_so()`; raise TimeoutError after `patience_s`."""
    end_s = time.monotonic() + patience_s
    while not is_so():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what}: not within {patience_s:g} s")
        time.sleep(0.02)


@contextlib.contextmanager
def job_of(step_s: float, *options: str, with_mount: bool = False) -> Iterator[HangJob]:
    """A running job in a folder of its own on shared memory."""
    root = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="pacekeeper-hangs-", dir=root))
    try:
        with contextlib.ExitStack() as ends:
            mount = None
            if with_mount and can_mount():
                mount = ends.enter_context(StuckMount(folder / "mount"))
            yield ends.enter_context(
                HangJob(folder=folder, step_s=step_s, options=options, mount=mount)
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def one_fault(kind: str, step_s: float) -> dict[str, Any]:
    """Strike a fresh job; what was named, when, and with which stacks."""
    with job_of(step_s, with_mount=kind in (READ, READ_ALL)) as job:
        began_s = job.strike(kind)
        with contextlib.suppress(TimeoutError):
            wait_for("a hang is named", job.hangs, 30.0 + 4.0 * step_s)
        found = job.hangs()
        told: dict[str, Any] = {"kind": kind, "step_s": step_s, "found": False, "false": 0}
        if kind in (READ, READ_ALL):  # the ranks meet it when they read again
            began_s = max(began_s, float((job.data(CULPRIT) / "began").read_text()))
        for incident in found:
            rank = incident.rank if incident.HasField("rank") else None
            is_right = rank == (None if kind in OF_JOB else CULPRIT)
            told["false"] += not is_right
            if is_right and not told["found"]:
                told |= {"found": True, "delay_s": incident.opened_unix_s - began_s}
                told |= {"tier": incident.tier, "cause": incident.cause}
                stacks = job.stacks(incident.incident_id)
                told["stack"] = stacks[0].source if stacks else ""
        told["storage"] = "fuse" if job.mount is not None else "fifo"
        return told


def healthy(seconds: float) -> dict[str, Any]:
    """Healthy jobs in which ranks stall, rest and pause; what was named all the same."""
    told: dict[str, Any] = {}
    for name, options in (
        ("stalls", ("--stalls", "0.05")),
        ("rank 0 rests", ("--rest-s", "6")),
        ("paused", ()),
    ):
        with job_of(0.05, *options) as job:
            end_s = time.monotonic() + seconds
            while time.monotonic() < end_s:
                time.sleep(2.0)
                if name == "paused":
                    for number in (signal.SIGSTOP, signal.SIGCONT):
                        for rank in range(SIZE):
                            os.kill(job.pid(rank), number)
                        time.sleep(4.0)
            told[name] = {
                "seconds": round(seconds),
                "steps": job.steps(),
                "false": len(job.hangs()),
                "reasons": [incident.reason for incident in job.hangs()],
            }
    return told


def main() -> int:
    """Run all faults, then the healthy jobs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="not used: the jobs are made here")
    parser.add_argument("--runs", type=int, default=3, help="of each fault and length of a step")
    parser.add_argument("--step-s", type=float, nargs="+", default=[0.1, 1.5])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--healthy-s", type=float, default=60.0, help="of each healthy job")
    args = parser.parse_args()
    exit_on_stop_signals()
    load = os.getloadavg()[0]
    runs = [
        one_fault(kind, step_s)
        for kind in args.kinds
        for step_s in args.step_s
        for _ in range(args.runs)
    ]
    table = Table(title=f"hangs, {SIZE} ranks; load {load:.1f} on {os.cpu_count()} cores")
    for column in ("kind", "step s", "found", "false", "delay s", "worst", "in usual", "stacks"):
        table.add_column(column)
    faults = []
    for kind in args.kinds:
        for step_s in args.step_s:
            own = [run for run in runs if (run["kind"], run["step_s"]) == (kind, step_s)]
            delays_s = [run["delay_s"] for run in own if run["found"]]
            row = {
                "kind": kind,
                "step_s": step_s,
                "runs": len(own),
                "found": len(delays_s),
                "false": sum(run["false"] for run in own),
                "delay_s": round(statistics.median(delays_s), 2) if delays_s else None,
                "worst_s": round(max(delays_s), 2) if delays_s else None,
                "usual_times": round(max(delays_s) / step_s, 1) if delays_s else None,
                "bar_s": max(LIMIT_S, 2.0 * step_s),
                "stacks": sorted({run.get("stack", "") for run in own}),
                "causes": sorted({run.get("cause", "") for run in own}),
                "storage": sorted({run["storage"] for run in own}),
            }
            faults.append(row)
            table.add_row(
                kind, f"{step_s:g}", f"{row['found']}/{row['runs']}", str(row["false"]),
                str(row["delay_s"]), str(row["worst_s"]), str(row["usual_times"]),
                " ".join(row["stacks"]),
            )  # fmt: skip
    rest = healthy(args.healthy_s) if args.healthy_s else {}
    for name, one in rest.items():
        table.add_row(f"healthy: {name}", "0.05", "", str(one["false"]), "", "", "", "")
    Console(width=110).print(table)
    outcome = {
        "found": sum(row["found"] for row in faults),
        "runs": len(runs),
        "false": sum(row["false"] for row in faults) + sum(one["false"] for one in rest.values()),
        "load": round(load, 1),
        "faults": faults,
        "healthy": rest,
    }
    print(json.dumps(outcome))
    return 0 if outcome["found"] == outcome["runs"] and not outcome["false"] else 1


if __name__ == "__main__":
    sys.exit(main())
