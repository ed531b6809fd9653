"""The processes of the demonstration, started by the commands an operator would type."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from pacekeeper.cli.demo.process import command_line
from pacekeeper.cli.demo.run_dir import RINGS_PREFIX, remember_rings
from pacekeeper.core.errors import ExitCode, HostError, PacekeeperError
from pacekeeper.core.telemetry.shm_ring import COMMAND_OFFSET, decode_header, ring_file_name

NUM_NODES = 2
RANKS_PER_NODE = 2
NUM_RANKS = NUM_NODES * RANKS_PER_NODE
PORTS = range(29400, 32000)
PORTS_EACH = 7  # between those that neighbours by number of process look at first
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
# Ctrl-C, a service manager, a closed terminal: whoever ends the demo ends its fleet, too.
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OWN_WORDS = "pacekeeper: "  # how every command begins the line that says why it ended


@contextmanager
def held_signals() -> Iterator[None]:
    """A signal to end that comes meanwhile is heard at the end of the `with`.

    Else it would come between the start of a process and our knowing of it, or between two kills,
    and leave a process behind. What is started meanwhile hears its own signals as always.
    """
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in ENDINGS}
    heard = {n: h for n, h in before.items() if h not in (signal.SIG_IGN, None)}
    for number in heard:
        signal.signal(number, lambda heard_now, _: came.append(heard_now))
    try:
        yield
    finally:
        for number, handler in heard.items():
            signal.signal(number, handler)
        for waiting in came:
            signal.raise_signal(waiting)


class PartEndedError(PacekeeperError):
    """A part of the demo ended: its own words where it had some, and its own exit code."""

    def __init__(self, name: str, code: int, log: Path) -> None:
        lines = log.read_text(errors="replace").splitlines()
        said = [line for line in lines if line.startswith(OWN_WORDS)]
        why = said[-1].removeprefix(OWN_WORDS) if said else "\n" + "\n".join(lines[-8:])
        super().__init__(f"{name} ended with code {code}: {why}", remedy=f"the whole log is {log}")
        failures = {int(known): known for known in ExitCode if known is not ExitCode.OK}
        self.exit_code = failures.get(code, ExitCode.INTERNAL)


@dataclass(kw_only=True)
class Fleet:
    """One controller, two agents, two launchers; `with Fleet(...)` leaves no process behind.

    Nor does the end of this process, whatever ends it. Use from the main thread.
    `run_dir`, a claimed one (`demo_folder`), keeps logs, the store and the step logs; the rings lie
    on tmpfs where there is one.
    `train_file`: settings of the trainer ([train] of a TOML file) beyond those named here.
    """

    run_dir: Path
    job: str
    steps: int
    seed: int
    clock: str
    train_file: Path | None = None
    address: str = ""
    ring_root: Path = field(init=False)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)

    def __enter__(self) -> "Fleet":
        shared_memory = Path("/dev/shm")
        on_tmpfs = shared_memory.is_dir() and os.access(shared_memory, os.W_OK)
        self.ring_root = Path(
            tempfile.mkdtemp(prefix=RINGS_PREFIX, dir=shared_memory if on_tmpfs else None)
        )
        try:
            remember_rings(self.run_dir, self.ring_root)
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _start(self) -> None:
        self._spawn(
            "controller",
            ["controller", "--listen", "127.0.0.1:0", "--store", self._path("controller.sqlite")],
        )
        self.address = self._wait_for_listening()
        for node in range(NUM_NODES):
            (self.ring_root / f"node-{node}").mkdir()
            self._spawn(
                f"agent-{node}",
                ["agent", "--controller", self.address, "--node", f"node-{node}"]
                + ["--ring-dir", self.ring_dir(node), "--metrics-listen", ""]
                + ["--record", self._path("traces")],
            )
        rendezvous = f"127.0.0.1:{free_port()}"
        for node in range(NUM_NODES):
            self._spawn(
                f"launch-{node}",
                ["launch", "--job", self.job, "--ring-dir", self.ring_dir(node)]
                + ["--node-rank", str(node), "--num-nodes", str(NUM_NODES)]
                + ["--ranks-per-node", str(RANKS_PER_NODE), "--rendezvous", rendezvous]
                + ["--faults", self._path("faults"), "--run-dir", self._path("train")]
                + ["--steps", str(self.steps), "--seed", str(self.seed), "--clock", self.clock]
                + (["--config", str(self.train_file)] if self.train_file is not None else []),
            )

    def _spawn(self, name: str, arguments: list[str]) -> None:
        self.commands.append("pacekeeper " + " ".join(a if a else '""' for a in arguments))
        with (self.run_dir / "logs" / f"{name}.log").open("wb") as log, held_signals():
            self.processes[name] = subprocess.Popen(
                command_line(*arguments),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is ours to hand on, in order
            )

    def _wait_for_listening(self) -> str:
        log = self.run_dir / "logs" / "controller.log"
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < give_up_s:
            for line in log.read_text(errors="replace").splitlines():
                if line.startswith("listening on "):
                    return line.removeprefix("listening on ").strip()
            self.check()
            time.sleep(0.05)
        raise PacekeeperError("the controller did not start", remedy=f"see {log}")

    def check(self) -> None:
        """Raises PartEndedError where a process has ended that should still run, or ended badly."""
        for name, process in self.processes.items():
            code = process.poll()
            if code is not None and not (name.startswith("launch") and code == 0):
                raise PartEndedError(name, code, self.run_dir / "logs" / f"{name}.log")

    @property
    def training_is_over(self) -> bool:
        return all(
            process.poll() is not None
            for name, process in self.processes.items()
            if name.startswith("launch")
        )

    def ring_dir(self, node: int) -> str:
        """The ring directory of a node, as its operator passes it."""
        return str(self.ring_root / f"node-{node}")

    def pid_of(self, rank: int) -> int:
        """The process of a rank, from the header of its ring."""
        path = Path(self.ring_dir(rank // RANKS_PER_NODE)) / self.job / ring_file_name(rank)
        with path.open("rb") as ring:
            return decode_header(ring.read(COMMAND_OFFSET)).pid

    def kill_rank(self, rank: int) -> float:
        """SIGKILL one rank; the monotonic time just before."""
        pid = self.pid_of(rank)
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return killed_s

    def stop(self) -> None:
        """End all processes: trainers first, so that nobody reports a death that is none."""
        with held_signals():
            for prefix in ("launch", "agent", "controller"):
                self._stop_all([p for name, p in self.processes.items() if name.startswith(prefix)])
            shutil.rmtree(self.ring_root, ignore_errors=True)

    def _stop_all(self, group: list[subprocess.Popen[bytes]]) -> None:
        for process in group:
            if process.poll() is None:
                process.terminate()
        give_up_s = time.monotonic() + STOP_TIMEOUT_S
        for process in group:
            try:
                process.wait(max(0.1, give_up_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _path(self, name: str) -> str:
        return str(self.run_dir / name)


def free_port() -> int:
    """A port below the ephemeral range, so that no client's connection can take it meanwhile.

    Two demos that start together look at different ones: it is seconds until a launcher takes it.
    """
    first = os.getpid() * PORTS_EACH % len(PORTS)
    for further in range(len(PORTS)):
        port = PORTS[(first + further) % len(PORTS)]
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise HostError(
        f"no free port between {PORTS.start} and {PORTS.stop}", remedy="close some services"
    )
