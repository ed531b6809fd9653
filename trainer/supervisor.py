"""One per node: hosts the node's store, starts its ranks, watches their exits, fences.

The survivors of a death are left alone - that is the difference to other launchers. A death is
told to all stores and, through a ring of its own, to the agent; who was declared dead is killed.
"""

import contextlib
import logging
import multiprocessing
import os
import platform
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from pacekeeper.core.config import TrainConfig
from pacekeeper.core.errors import ExitCode
from pacekeeper.core.records import RankExitRecord
from pacekeeper.core.ring import MAX_RANKS, SUPERVISOR_RING
from pacekeeper.core.topology import Attachment
from pacekeeper.trainer.device import choose_clock, num_devices, say_clock
from pacekeeper.trainer.limits import check_startable, node_limits
from pacekeeper.trainer.loop import rank_main
from pacekeeper.trainer.quorum import FIRST_GROUP
from pacekeeper.trainer.rank import RankSpec
from pacekeeper.trainer.rendezvous import meet
from pacekeeper.trainer.stores import (
    DEATHS_KEY,
    FINISHED_KEY,
    STOP_KEY,
    Stores,
    fence_key,
    group_key,
    host_store,
    notice,
    own_host_towards,
    split_address,
)
from pacekeeper.trainer.telemetry import Ring, claim_directory

POLL_S = 0.05
GRACE_S = 10.0  # beyond the longest that a step's collective may wait for a member
SAME_WISH_S = 1.0
AGENT_SILENCE_S = 10.0  # an agent looks many times a second
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """What a supervisor is started with. Ranks of node i: i * ranks_per_node and following."""

    config: TrainConfig
    node_rank: int
    num_nodes: int
    ranks_per_node: int
    rendezvous: str
    ring_dir: str
    run_dir: str
    faults_dir: str = ""

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.ranks_per_node < 1:
            raise ValueError("a job needs at least one node and one rank per node")
        if self.world_size > MAX_RANKS:
            raise ValueError(f"{self.world_size} ranks: a job has at most {MAX_RANKS}")
        if not 0 <= self.node_rank < self.num_nodes:
            raise ValueError(f"node-rank: expected 0 to {self.num_nodes - 1}, got {self.node_rank}")

    @property
    def ranks(self) -> range:
        first = self.node_rank * self.ranks_per_node
        return range(first, first + self.ranks_per_node)

    @property
    def node_of(self) -> dict[int, int]:
        """The node of every rank of the job."""
        return {rank: rank // self.ranks_per_node for rank in range(self.world_size)}

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def terms(self) -> dict[str, object]:
        """What all launchers of the job must have been told alike.

        The text to train on is the standard library of the Python at hand.
        """
        settings = asdict(self.config)
        del settings["clock"]  # node 0's holds for all
        return settings | {
            "num-nodes": self.num_nodes,
            "ranks-per-node": self.ranks_per_node,
            "Python": platform.python_version(),
        }


def supervise(spec: NodeSpec, body: Callable[[RankSpec], None] = rank_main) -> ExitCode:
    """Run this node's part of the job to its end; `body` is what its rank processes run.

    OK where at least one rank finished (others may have died on the way) or all ended on request;
    the worst rank's code otherwise. Raises ConfigError (no HOST:PORT, another job meets there or on
    other terms), HostError (port or ring directory taken, too many ranks for this machine, no such
    device) and UnreachableError (no rendezvous).
    """
    check_startable(spec.ranks_per_node, spec.world_size, node_limits())
    wanted, devices = spec.config.clock, num_devices()
    clock = choose_clock(wanted, devices)
    host, port = split_address(spec.rendezvous)
    if spec.node_rank > 0:
        host, port = own_host_towards(spec.rendezvous), 0
    server = host_store(host, port)
    # Whatever can fail here fails before the others count on this node.
    claim = claim_directory(Path(spec.ring_dir), spec.config.job)
    try:
        met = meet(
            spec.rendezvous,
            node_rank=spec.node_rank,
            num_nodes=spec.num_nodes,
            own=f"{host}:{server.port}",
            clock=clock,
            terms=spec.terms,
        )
        if wanted == "auto":  # one clock for all nodes: that of node 0
            clock = choose_clock(met.clock, devices)
        say_clock(clock, wanted, devices, len(spec.ranks))
        spec = replace(spec, config=replace(spec.config, clock=clock))
        supervisor = Supervisor(spec, met.addresses, met.life, body)
        _on_stop(supervisor.ask_to_stop)
        try:
            supervisor.start()
            return supervisor.watch()
        finally:
            supervisor.kill_all()
    finally:
        if claim >= 0:  # the directory's files stay for the agent to read to their end
            os.close(claim)


class Supervisor:
    """The watcher of one node's rank processes."""

    def __init__(
        self,
        spec: NodeSpec,
        addresses: tuple[str, ...],
        life: int,
        body: Callable[[RankSpec], None],
    ) -> None:
        self.spec = spec
        self.life = life
        self.body = body
        self.fenced: set[int] = set()
        self.addresses = addresses
        self.stores = Stores(addresses)
        self.processes: dict[int, ForkServerProcess] = {}
        self.codes: dict[int, int] = {}  # exit codes of ended ranks; negative: signal
        self.stop_asked_s = 0.0
        self.over_s = 0.0  # since when some rank of the job has ended as all will
        self.is_told = False
        self.is_impatient = False  # asked to stop a second time
        self.is_watched = True  # until an agent fails to come, or to come again
        self._born_s = time.monotonic()
        self.ring = Ring.create(
            Path(spec.ring_dir),
            Attachment(
                job=spec.config.job,
                rank=spec.ranks[0],
                world_size=spec.world_size,
                pid=os.getpid(),
                role="supervisor",
                life=life,
            ),
            file_name=SUPERVISOR_RING,
        )

    def start(self) -> None:
        """Start all ranks, from a server that has torch loaded already."""
        for node in range(self.spec.num_nodes):
            self.stores.client(node)  # a death is told at once, not after connecting
        context = _rank_server()
        for rank in self.spec.ranks:
            process = context.Process(
                target=_run,
                args=(
                    self.body,
                    RankSpec(
                        config=self.spec.config,
                        rank=rank,
                        world_size=self.spec.world_size,
                        node_of=self.spec.node_of,
                        stores=self.addresses,
                        ring_dir=self.spec.ring_dir,
                        run_dir=self.spec.run_dir,
                        faults_dir=self.spec.faults_dir,
                        life=self.life,
                    ),
                ),
                name=f"rank-{rank}",
            )
            process.start()
            self.processes[rank] = process
            _log.info("rank=%d pid=%d started", rank, process.pid)

    def watch(self) -> ExitCode:
        """Until all ranks ended. Survivors are left alone."""
        while len(self.codes) < len(self.processes):
            running = {p.sentinel: r for r, p in self.processes.items() if r not in self.codes}
            for sentinel in wait(list(running), timeout=POLL_S):
                assert isinstance(sentinel, int), "sentinels are descriptors"
                self._ended(running[sentinel])
            self._fence()
            self._end_the_late(time.monotonic())
            self._look_for_agent(time.monotonic())
            self._follow_stop(time.monotonic())
        return self._verdict()

    def ask_to_stop(self) -> None:
        """Let the whole job end at a step boundary; asked again, kill this node's ranks now.

        One request may come twice at once: to the process and to its group.
        """
        now_s = time.monotonic()
        self.stop_asked_s = self.stop_asked_s or now_s
        self.is_impatient = now_s - self.stop_asked_s > SAME_WISH_S

    def _follow_stop(self, now_s: float) -> None:
        """The wish is in all stores before anybody is killed for being slow to follow it.

        Else the ranks that knew of it are gone, and the others take them for dead and go on.
        """
        if not self.stop_asked_s:
            if self.stores.read(self.spec.node_rank, STOP_KEY) is None:
                return
            _log.info("another launcher asks the job to end")
            self.stop_asked_s = now_s
        if not self.is_told:
            self.is_told = True
            self.stores.append_everywhere(STOP_KEY, f"{self.spec.node_rank},")
            self._tell_to_stop()
        grace_s = GRACE_S + self.spec.config.peer_timeout_s
        if self.is_impatient or now_s - self.stop_asked_s > grace_s:
            self.kill_all()

    def kill_all(self) -> None:
        """SIGKILL whatever still runs."""
        for process in self.processes.values():
            if process.is_alive():
                process.kill()

    def _look_for_agent(self, now_s: float) -> None:
        """Say when nobody reads this node's rings, and when somebody does again."""
        seen_s = max(self.ring.heartbeat_mono_s(), self._born_s)
        is_watched = now_s - seen_s <= AGENT_SILENCE_S
        if is_watched == self.is_watched:
            return
        self.is_watched = is_watched
        if is_watched:
            _log.info("an agent reads the rings")
        else:
            _log.warning(
                "no agent has read the rings in %s for %.0f s: training goes on unwatched",
                self.spec.ring_dir,
                AGENT_SILENCE_S,
            )

    def _tell_to_stop(self) -> None:
        for rank, process in self.processes.items():
            if rank not in self.codes:
                process.terminate()

    def _ended(self, rank: int) -> None:
        process = self.processes[rank]
        process.join()
        code = process.exitcode if process.exitcode is not None else int(ExitCode.INTERNAL)
        self.codes[rank] = code
        self.ring.write(
            RankExitRecord(
                rank=rank,
                pid=process.pid or 0,
                exit_code=max(0, code),
                signal=max(0, -code),
                detected_mono_s=time.monotonic(),
            )
        )
        if code == 0:
            _log.info("rank=%d finished", rank)
        else:
            _log.warning("rank=%d died: %s", rank, _describe(code))
        if code:
            self.stores.append_everywhere(DEATHS_KEY, notice(rank, self._last_group(rank)))

    def _last_group(self, rank: int) -> str:
        """What the rank said it belonged to; no group's name where that can not be known."""
        said = self.stores.read(self.spec.node_rank, group_key(rank))
        if self.spec.node_rank in self.stores.gone:
            return ""
        return FIRST_GROUP if said is None else said

    def _fence(self) -> None:
        """Kill for good who was declared dead elsewhere: it must never wake up again."""
        declared = self.ring.command().dead_ranks
        for rank, process in self.processes.items():
            if rank in self.codes or rank in self.fenced:
                continue
            asked = self.stores.read(self.spec.node_rank, fence_key(rank)) is not None
            if asked or rank in declared:
                _log.warning("rank=%d is fenced (killed): it was declared dead", rank)
                self.fenced.add(rank)
                process.kill()

    def _end_the_late(self, now_s: float) -> None:
        """Who is frozen when all steps are done has nobody left that would miss and fence it.

        Only who is stopped: another may still write its last checkpoint.
        """
        if not self.over_s:
            is_over = bool({ExitCode.OK, ExitCode.LOST_STATE} & set(self.codes.values()))
            if is_over or self.stores.read(self.spec.node_rank, FINISHED_KEY) is not None:
                self.over_s = now_s
        elif now_s - self.over_s > self.spec.config.peer_timeout_s:
            for rank, process in self.processes.items():
                is_here = rank not in self.codes and rank not in self.fenced
                if is_here and _is_stopped(process.pid):
                    _log.warning("rank=%d is fenced (killed): the job is over and it is not", rank)
                    self.fenced.add(rank)
                    process.kill()

    def _verdict(self) -> ExitCode:
        codes = set(self.codes.values())
        # A rank that was asked to end before it could listen ends by the signal itself.
        if 0 in codes or (self.stop_asked_s and codes <= {-signal.SIGTERM}):
            return ExitCode.OK
        known = {int(code) for code in ExitCode}
        own = [code for code in self.codes.values() if code in known]
        return ExitCode(max(own, default=int(ExitCode.INTERNAL)))


def _rank_server() -> ForkServerContext:
    """The process that ranks are forked from, deaf to SIGTERM.

    Service managers and schedulers send it to the whole group. The ranks follow it in order; if
    their server followed it, the kernel would kill them with it, in mid-step.
    """
    context = multiprocessing.get_context("forkserver")
    # The optimizer imports dynamo at its first step: here once, else in every rank.
    context.set_forkserver_preload(["pacekeeper.trainer.loop", "torch._dynamo"])
    resource_tracker.ensure_running()  # else it is started below, and that unblocks the signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return context


def _run(body: Callable[[RankSpec], None], spec: RankSpec) -> None:
    """A rank's process. It inherits its server's deafness: `train` opens its ears."""
    body(spec)


def _on_stop(stop: Callable[[], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop())


def _is_stopped(pid: int | None) -> bool:
    """Does the kernel keep it from running (SIGSTOP, a debugger)?"""
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state in ("T", "t")
    return False


def _describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
