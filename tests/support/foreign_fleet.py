"""A real controller and a real agent beside ranks of another trainer, and what they found."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from pacekeeper.core.telemetry.records import Record
from pacekeeper.protos import status_pb2
from support.commands import Started
from support.controllers import ControllerProcess, until
from support.forked_ranks import STEPS
from support.rings import records_in
from support.tree import ROOT

PATIENCE_S = 240.0  # for a broken world only


class ForeignRuns:
    """What a script of runs left: rings of lone runs, and what a controller says of jobs."""

    def __init__(self, folder: Path, status: Any) -> None:
        self.folder = folder
        self._status = status

    def records(self, job: str, rank: int = 0) -> list[Record]:
        """Of a run in the rings that no agent reads."""
        return records_in(self.folder / "alone" / job / f"rank-{rank:05d}.ring")

    def job(self, name: str) -> Any:
        try:
            return self._status.GetJob(status_pb2.GetJobRequest(job=name), timeout=30.0).job
        except grpc.RpcError:
            return status_pb2.Job()

    def faults(self, job: str) -> list[Any]:
        """Incidents of a job that are no advice on how its work is spread."""
        found = self._status.ListIncidents(status_pb2.ListIncidentsRequest(), timeout=30.0)
        return [i for i in found.incidents if i.job == job and not i.kind.endswith("_imbalance")]

    def until_told(self, job: str) -> None:
        """Until the controller has the last step of a job of ranks."""
        until(f"{job} is told", lambda: self.job(job).step >= STEPS - 1, PATIENCE_S)


@contextmanager
def foreign_runs(script: str, folder: Path) -> Iterator[ForeignRuns]:
    """`tests/support/SCRIPT.py` beside an agent and a controller, run to its end."""
    rings = folder / "rings"
    rings.mkdir()
    with ControllerProcess(folder) as controller:
        agent = ["agent", "--controller", controller.address, "--node", "node-0"]
        with Started(*agent, "--ring-dir", str(rings), "--metrics-listen", "") as running:
            try:
                code = run_script(script, folder, rings)
                logs = "".join(path.read_text()[-3000:] for path in sorted(folder.glob("*.log")))
                assert code == 0, logs
                yield ForeignRuns(folder, controller.status)
            finally:
                running.kill()


def run_script(script: str, folder: Path, rings: Path) -> int:
    """The exit code of `tests/support/SCRIPT.py`; no rank outlives it."""
    command = [sys.executable, "-m", f"support.{script}", str(rings), str(folder)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests"), *sys.path[1:])),
        "OMP_NUM_THREADS": "1",
    }
    with (folder / "script.log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
    try:
        return process.wait(PATIENCE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
