"""Processes of the demo: controller, agents and launchers, started by the operator's commands."""

import contextlib
import json
import os
import re
import secrets
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

from pacekeeper.cli.demo.job import write_settings
from pacekeeper.cli.demo.process import command_line
from pacekeeper.cli.demo.run_dir import RINGS_PREFIX, record_ring_root
from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import ExitCode, HostError, PacekeeperError
from pacekeeper.core.telemetry.shm_ring import COMMAND_OFFSET, decode_header, ring_file_name

NUM_NODES = 2
RANKS_PER_NODE = 2
NUM_RANKS = NUM_NODES * RANKS_PER_NODE
LISTENING = re.compile(r"listening on (\S+) for agents, (\S+) for commands\n")
PORTS = range(29400, 32000)
PORTS_PER_PROCESS = 7  # distance between the first ports tried by processes with adjacent IDs
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
# Ctrl-C, a service manager, a closed terminal: each ends the fleet as well.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ERROR_PREFIX = "pacekeeper: "  # prefix of the error line of every command


@contextmanager
def defer_signals() -> Iterator[None]:
    """Defer stop signals to the end of the `with` block.

    Without it, a signal between the start of a process and its registration, or between two kills,
    would leave a process behind. Child processes handle their signals as usual.
    """
    pending: list[int] = []
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    handled = {n: h for n, h in before.items() if h not in (signal.SIG_IGN, None)}
    for number in handled:
        signal.signal(number, lambda received, _: pending.append(received))
    try:
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
        for waiting in pending:
            signal.raise_signal(waiting)


class ProcessExitedError(PacekeeperError):
    """A process of the demo ended early; carries its error line and its exit code."""

    def __init__(self, name: str, code: int, log: Path) -> None:
        lines = log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if line.startswith(ERROR_PREFIX)]
        why = errors[-1].removeprefix(ERROR_PREFIX) if errors else "\n" + "\n".join(lines[-8:])
        super().__init__(f"{name} exited with code {code}: {why}", remedy=f"see the log {log}")
        failures = {int(known): known for known in ExitCode if known is not ExitCode.OK}
        self.exit_code = failures.get(code, ExitCode.INTERNAL)


@dataclass(kw_only=True)
class Fleet:
    """One controller, two agents, two launchers; `with Fleet(...)` leaves no process behind.

    All processes also end with this one, however it ends. Use from the main thread. The rings lie
    on tmpfs if there is one.

    Attributes:
        run_dir: a claimed directory (`claim_run_dir`) for logs, store and step logs.
        listen: HOST:PORT of the controller for agents.
        address: HOST:PORT of the controller for commands.
        config: settings of the job; its model and data are there (`job.write_job`).
    """

    run_dir: Path
    config: EngineConfig
    listen: str = ""
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
            record_ring_root(self.run_dir, self.ring_root)
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
            ["controller", "--listen", "127.0.0.1:0", "--api-listen", "127.0.0.1:0"]
            + ["--store", self._path("controller.sqlite")],
        )
        self.listen, self.address = self._wait_for_listening()
        for node in range(NUM_NODES):
            (self.ring_root / f"node-{node}").mkdir()
            self._spawn(
                f"agent-{node}",
                ["agent", "--controller", self.listen, "--node", f"node-{node}"]
                + ["--ring-dir", self.ring_dir(node), "--metrics-listen", ""]
                + ["--record", self._path("traces")],
            )
        rendezvous = f"127.0.0.1:{free_port()}"
        secret = os.open(self._path("secret"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(secret, "w") as file:
            file.write(secrets.token_hex())
        settings = write_settings(self.run_dir, self.config)
        device = ["--emulate"] if self.config.emulate else []
        for node in range(NUM_NODES):
            self._spawn(
                f"launch-{node}",
                ["launch", "--config", str(settings), *device, "--ring-dir", self.ring_dir(node)]
                + ["--node-rank", str(node), "--num-nodes", str(NUM_NODES)]
                + ["--ranks-per-node", str(RANKS_PER_NODE), "--rendezvous", rendezvous]
                + ["--faults", self._path("faults"), "--run-dir", self._path("train")]
                + ["--secret-file", self._path("secret")],
            )

    def _spawn(self, name: str, arguments: list[str]) -> None:
        self.commands.append("pacekeeper " + " ".join(a if a else '""' for a in arguments))
        with (self.run_dir / "logs" / f"{name}.log").open("wb") as log, defer_signals():
            self.processes[name] = subprocess.Popen(
                command_line(*arguments),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches this process only; it stops the fleet
            )

    def _wait_for_listening(self) -> tuple[str, str]:
        log = self.run_dir / "logs" / "controller.log"
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < give_up_s:
            if found := LISTENING.search(log.read_text(errors="replace")):
                return found[1], found[2]
            self.check()
            time.sleep(0.05)
        raise PacekeeperError("the controller did not start in time", remedy=f"see {log}")

    def check(self) -> None:
        """Check the processes.

        Raises:
            ProcessExitedError: one ended that should run, or failed.
        """
        for name, process in self.processes.items():
            code = process.poll()
            if code is not None and not (name.startswith("launch") and code == 0):
                raise ProcessExitedError(name, code, self.run_dir / "logs" / f"{name}.log")

    @property
    def is_training_finished(self) -> bool:
        return all(
            process.poll() is not None
            for name, process in self.processes.items()
            if name.startswith("launch")
        )

    def ring_dir(self, node: int) -> str:
        """Return the ring directory of a node."""
        return str(self.ring_root / f"node-{node}")

    def pid_of(self, rank: int) -> int:
        """Return the process ID of a rank, from the header of its ring."""
        path = Path(self.ring_dir(rank // RANKS_PER_NODE)) / self.config.job / ring_file_name(rank)
        with path.open("rb") as ring:
            return decode_header(ring.read(COMMAND_OFFSET)).pid

    def set_fault(self, rank: int, slowdown: float) -> None:
        """Set the slowdown of a rank's device; 1.0 ends it."""
        path = self.run_dir / "faults" / f"rank-{rank}.json"
        fresh = path.with_suffix(".tmp")
        fresh.write_text(json.dumps({"slowdown": slowdown}))
        fresh.rename(path)

    def kill_rank(self, rank: int) -> float:
        """Send SIGKILL to one rank; return the monotonic time just before."""
        pid = self.pid_of(rank)
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return killed_s

    def stop(self) -> None:
        """End all processes, launchers first, so that no agent reports them as dead ranks."""
        with defer_signals():
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
    """Return a free port below the ephemeral range, which no outgoing connection can take.

    Demos that start together try different ports first: a launcher binds its port seconds later.
    """
    first = os.getpid() * PORTS_PER_PROCESS % len(PORTS)
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
