"""The launcher of one node: starts its ranks, watches them, and ends all when one fails.

Ranks are forked from a server that has loaded torch and transformers. Each reports its failure
through a pipe; the first cause becomes the launcher's own error. No death is survived here.
"""

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from types import FrameType

from torch.distributed import DistBackendError

from pacekeeper.core.addresses import split_address
from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import ConfigError, ExitCode, PacekeeperError
from pacekeeper.core.telemetry.shm_ring import MAX_RANKS
from pacekeeper.trainer.distributed.device import num_devices
from pacekeeper.trainer.distributed.kv_store import host_store
from pacekeeper.trainer.elastic.launch_spec import check_startable, node_limits
from pacekeeper.trainer.elastic.launcher import rank_server
from pacekeeper.trainer.engine.rank_process import (
    STOP_SIGNALS,
    RunFolders,
    choose_device,
    run_rank,
    wanted_device,
)
from pacekeeper.trainer.groups.agreement import OtherRanksError

LOADED = ("pacekeeper.trainer.engine.training", "torch._dynamo")
CAUSE_S = 2.0  # for which the ranks of a failed job may still say why
SAME_WISH_S = 1.0  # a terminal sends Ctrl-C once, and a shell may send it again
_POLL_S = 0.2
_MOST_TRACE_CHARS = 16_000  # it fits a pipe that nobody reads yet
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNode:
    """A node's place in the job, and what its ranks do.

    Attributes:
        config: The settings.
        folders: Of all ranks of the node.
        node_rank: Number of the node, from 0 on.
        num_nodes: Nodes of the job.
        ranks_per_node: Ranks of each node.
        rendezvous: HOST:PORT of the store, which node 0 serves.
    """

    config: EngineConfig
    folders: RunFolders
    node_rank: int
    num_nodes: int
    ranks_per_node: int
    rendezvous: str

    def __post_init__(self) -> None:
        problem = ""
        if self.num_nodes < 1 or self.ranks_per_node < 1:
            problem = "a job needs at least one node and one rank per node"
        elif self.world_size > MAX_RANKS:
            problem = f"{self.world_size} ranks: a job has at most {MAX_RANKS}"
        elif not 0 <= self.node_rank < self.num_nodes:
            problem = f"--node-rank: expected 0 to {self.num_nodes - 1}, got {self.node_rank}"
        try:
            split_address(self.rendezvous)
        except ValueError as error:
            problem = problem or f"--rendezvous: {error}"
        if problem:
            raise ConfigError(f"command line: {problem}")

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.num_nodes * self.ranks_per_node

    def environment(self, local_rank: int) -> dict[str, str]:
        """Return what torchrun would set for a rank of this node."""
        host, port = split_address(self.rendezvous)
        found = {
            "RANK": str(self.node_rank * self.ranks_per_node + local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            # The launcher serves the store, so that a port in use is found before a rank starts.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        if host.startswith("127."):
            found["GLOO_SOCKET_IFNAME"] = "lo"  # else it looks for the name of this host
        return found


class RankFailure(PacekeeperError):
    """A rank of this node failed; the exit code is the rank's."""

    def __init__(self, what: str, *, remedy: str = "", exit_code: int) -> None:
        super().__init__(what, remedy=remedy)
        self.exit_code = exit_code  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """How a rank ended badly: a report of its own, or none for one that was killed."""

    rank: int
    exit_code: int  # negative: the signal that ended it
    what: str = ""
    remedy: str = ""
    trace: str = ""
    is_echo: bool = False  # the cause is on another rank
    failed_s: float = 0.0  # on this node's monotonic clock

    @property
    def is_cause(self) -> bool:
        """Whether it surely follows from no other end: a trace may be of a broken connection."""
        return not self.is_echo and not self.trace

    @property
    def order(self) -> tuple[bool, float]:
        """Causes before echoes, by time; what was killed from outside has no time and is first."""
        return self.is_echo, self.failed_s


def launch(node: EngineNode) -> None:
    """Run this node's ranks to their end.

    Returns when all have finished, or have ended after a step because somebody asked.

    Raises:
        HostError: The port, memory, open files or devices of this machine do not suffice.
        RankFailure: A rank failed; all ranks of the node have ended.
    """
    check_startable(node.ranks_per_node, node.world_size, node_limits())
    choose_device(wanted_device(node.config), num_devices(), node.ranks_per_node)
    store = None
    if node.node_rank == 0 and node.world_size > 1:
        host, port = split_address(node.rendezvous)
        store = host_store(host, port)
        node = replace(node, rendezvous=f"{host}:{store.port}")
    _Ranks(node).run()
    del store


class _Ranks:
    """The rank processes of a node."""

    def __init__(self, node: EngineNode) -> None:
        self._node = node
        self._first = node.node_rank * node.ranks_per_node
        self._running: dict[int, ForkServerProcess] = {}
        self._reports: dict[int, Connection] = {}
        self._ends: list[_End] = []
        self._asked_s = 0.0
        self._is_impatient = False

    def run(self) -> None:
        with _hearing(self._ask_to_stop):
            try:
                self._start()
                self._watch()
            finally:
                self._kill_all()
        if self._is_impatient:
            raise RankFailure("ended at once, in mid-step", exit_code=128 + signal.SIGINT)
        if self._ends:
            raise self._failure()

    def _ask_to_stop(self) -> None:
        now_s = time.monotonic()
        self._asked_s = self._asked_s or now_s
        self._is_impatient = now_s - self._asked_s > SAME_WISH_S

    def _start(self) -> None:
        context = rank_server(LOADED)
        for local in range(self._node.ranks_per_node):
            rank = self._first + local
            theirs: Connection
            self._reports[rank], theirs = context.Pipe(duplex=False)
            environment = self._node.environment(local)
            process = context.Process(
                target=_rank_main,
                args=(self._node.config, self._node.folders, environment, theirs),
                name=f"rank-{rank}",
            )
            process.start()
            theirs.close()
            self._running[rank] = process
        pids = ", ".join(f"{rank}: {process.pid}" for rank, process in self._running.items())
        _log.info("started ranks (process ids) %s", pids)

    def _watch(self) -> None:
        is_forwarded = False
        give_up_s = float("inf")
        while self._running and time.monotonic() < give_up_s and not self._is_impatient:
            sentinels = {process.sentinel: rank for rank, process in self._running.items()}
            for sentinel in wait(list(sentinels), timeout=_POLL_S):
                assert isinstance(sentinel, int), "sentinels are descriptors"
                self._note_end(sentinels[sentinel])
            if any(end.is_cause for end in self._ends):
                return
            if self._ends:
                give_up_s = min(give_up_s, time.monotonic() + CAUSE_S)
            if self._asked_s and not is_forwarded:
                is_forwarded = True
                _log.info("asked to end: all ranks end after their step")
                for process in self._running.values():
                    process.terminate()

    def _note_end(self, rank: int) -> None:
        process = self._running.pop(rank)
        process.join()
        code = process.exitcode
        if code:
            said = {}
            with contextlib.suppress(EOFError):  # it was killed: it reported nothing
                said = json.loads(self._reports[rank].recv_bytes())
            self._ends.append(_End(rank=rank, exit_code=code, **said))

    def _kill_all(self) -> None:
        for process in self._running.values():
            process.kill()
        for rank in list(self._running):
            process = self._running[rank]
            process.join()
            if self._ends and process.exitcode != -signal.SIGKILL:
                self._note_end(rank)
        for report in self._reports.values():
            report.close()

    def _failure(self) -> RankFailure:
        end = min(self._ends, key=lambda one: one.order)
        if end.trace:
            _log.error("rank %d failed\n%s", end.rank, end.trace)
        if end.what:
            return RankFailure(end.what, remedy=end.remedy, exit_code=end.exit_code)
        if end.exit_code > 0:
            return RankFailure(
                f"rank {end.rank} ended with exit code {end.exit_code}", exit_code=end.exit_code
            )
        name = signal.Signals(-end.exit_code).name
        return RankFailure(
            f"rank {end.rank} was ended by {name}, so the other ranks were ended, too",
            remedy="a SIGKILL may come from the kernel where memory is short" * (name == "SIGKILL"),
            exit_code=128 - end.exit_code,
        )


@contextlib.contextmanager
def _hearing(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` for each signal to end; a hang-up that is to be ignored (nohup) stays so."""

    def heard(_number: int, _frame: FrameType | None) -> None:
        stop()

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or before[number] is not signal.SIG_IGN:
            signal.signal(number, heard)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def failure_report(error: BaseException, rank: str) -> tuple[int, dict[str, str | bool | float]]:
    """Return the exit code of a rank that failed, and what it tells its launcher."""
    if isinstance(error, PacekeeperError):
        is_echo = isinstance(error, OtherRanksError)
        return int(error.exit_code), {
            "what": error.what,
            "remedy": error.remedy,
            "is_echo": is_echo,
        }
    if isinstance(error, DistBackendError) or (
        isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    ):
        what = f"rank {rank} lost its connection to another rank"
        remedy = "the launcher of the node whose rank ended first says why"
        return int(ExitCode.UNREACHABLE), {"what": what, "remedy": remedy, "is_echo": True}
    what = f"rank {rank} failed: {type(error).__name__}: {error}"
    return int(ExitCode.INTERNAL), {
        "what": what[:_MOST_TRACE_CHARS],
        "trace": traceback.format_exc()[-_MOST_TRACE_CHARS:],
    }


def _rank_main(
    config: EngineConfig, folders: RunFolders, environment: dict[str, str], report: Connection
) -> None:
    """Be one rank: the main function of its process, which never returns."""
    _die_with_launcher()
    os.environ.update(environment)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s launch %(message)s", stream=sys.stderr, force=True
    )
    code = int(ExitCode.OK)
    try:
        run_rank(config, folders, os.environ)
    except BaseException as error:
        code, said = failure_report(error, environment["RANK"])
        report.send_bytes(json.dumps(said | {"failed_s": time.monotonic()}).encode())
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at exit a broken process group may wait for peers that are gone


def _die_with_launcher() -> None:
    launcher = multiprocessing.parent_process()

    def die() -> None:
        assert launcher is not None, "started by the launcher"
        launcher.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True, name="launcher").start()
