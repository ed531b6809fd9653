"""A real Slurm of one node, this one: munge, slurmctld and slurmd in a folder of their own."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "scontrol")
START_S = 90.0


def missing() -> str:
    """Why it can not be had here; empty where it can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"needs {', '.join(absent)} (Debian: slurmctld slurmd slurm-client munge)"
    return "" if os.getuid() == 0 else "slurmd needs root"


_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    """`node` is its only one."""

    folder: Path
    node: str

    @property
    def env(self) -> dict[str, str]:
        return {"PATH": _PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def show(self) -> str:
        """What `scontrol` says of the node, in one line; empty while nobody answers."""
        said = subprocess.run(
            ["scontrol", "show", "node", self.node, "--oneliner"],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return said.stdout

    def log(self) -> str:
        """What the node's daemon wrote."""
        return (self.folder / "slurmd.log").read_text()

    def wait(self, words: str, *, within_s: float = START_S) -> str:
        """Until `show` has `words`; raises AssertionError where that does not come."""
        end_s = time.monotonic() + within_s
        while words not in (shown := self.show()):
            assert time.monotonic() < end_s, f"no {words!r} in {shown!r}"
            time.sleep(0.2)
        return shown


@contextmanager
def running(folder: Path, *, check: Path, interval_s: int = 2) -> Iterator[Slurm]:
    """The cluster, its node idle. `check` is its HealthCheckProgram. `folder`: a short path."""
    slurm = Slurm(folder=folder, node=socket.gethostname().partition(".")[0])
    controller_port, node_port = free_port(), free_port()
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o700)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    (folder / "slurm.conf").write_text(
        f"""ClusterName=paper
SlurmctldHost={slurm.node}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller_port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
HealthCheckProgram={check}
HealthCheckInterval={interval_s}
NodeName={slurm.node} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
PartitionName=all Nodes={slurm.node} Default=YES State=UP
"""
    )
    munge = [f"--{name}={folder}/munge/{name}" for name in ("pid-file", "log-file", "seed-file")]
    commands = (
        ["munged", "--foreground", "--force", f"--key-file={key}", *munge]
        + [f"--socket={folder}/munge/socket", "--num-threads=1"],
        ["slurmctld", "-D", "-c", "-f", str(folder / "slurm.conf")],
        ["slurmd", "-D", "-f", str(folder / "slurm.conf")],
    )
    with ExitStack() as stack:
        for command in commands:
            stack.enter_context(_process(command, slurm.env, folder / f"{command[0]}.out"))
            if command[0] == "munged":
                _wait_for(folder / "munge" / "socket")
        slurm.wait("State=IDLE")
        yield slurm


@contextmanager
def _process(command: list[str], env: dict[str, str], output: Path) -> Iterator[None]:
    with output.open("wb") as sink:
        program = shutil.which(command[0], path=_PATH)
        process = subprocess.Popen(
            [str(program), *command[1:]],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_for(path: Path) -> None:
    end_s = time.monotonic() + START_S
    while not path.exists():
        assert time.monotonic() < end_s, f"{path} does not come"
        time.sleep(0.05)
