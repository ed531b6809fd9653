"""One per node: hosts the node's store, starts its ranks, watches their exits, fences.

The survivors of a death are left alone - that is the difference to other launchers. A death is
told to all stores and, through a ring of its own, to the agent; who was declared dead is killed.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Protocol

import torch

from pacekeeper.core.addresses import split_address
from pacekeeper.core.errors import ExitCode
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.records import RankExitRecord
from pacekeeper.core.telemetry.shm_ring import SUPERVISOR_RING
from pacekeeper.trainer.elastic.agreement.consensus import FailureTimeouts
from pacekeeper.trainer.elastic.agreement.job_key import JobKey
from pacekeeper.trainer.elastic.agreement.kv_store import (
    DEATHS_KEY,
    FINISHED_KEY,
    LEAST_CONNECT_S,
    STOP_KEY,
    Stores,
    fence_key,
    group_key,
    host_store,
    host_store_near,
    notice,
)
from pacekeeper.trainer.elastic.agreement.messages import JOB_KEY, JobFacts
from pacekeeper.trainer.elastic.agreement.quorum import FIRST_GROUP, NO_GROUP
from pacekeeper.trainer.elastic.agreement.signed_store import SignedStore
from pacekeeper.trainer.elastic.launch_spec import NodeSpec, RankSpec, check_startable, node_limits
from pacekeeper.trainer.elastic.loop import LEFT_BEHIND, rank_main
from pacekeeper.trainer.elastic.rendezvous import SESSION_KEY, meet, newest_run_id
from pacekeeper.trainer.groups.devices import choose_device, log_device, num_devices
from pacekeeper.trainer.groups.former import make_former
from pacekeeper.trainer.hooks.ring_writer import Ring, claim_directory

# The optimizer imports dynamo at its first step: here once, else in every rank.
RANKS_NEED = ("pacekeeper.trainer.elastic.engine_worker", "torch._dynamo")


class LauncherRun(Protocol):
    """What is left of a launcher's work when its ranks have ended."""

    run_id: int
    stores: Stores
    stop_asked_s: float  # 0: nobody asked
    is_waiting: bool  # to be let into a job that is running


class RestartHooks(Protocol):
    """`first_run_id`: of the job, 0 while it has had none (trainer/elastic/restart_policy.py)."""

    first_run_id: int

    def open(self, own: SignedStore) -> None:
        """Before the launchers meet; `own` is this node's store."""

    def end(self, ended: LauncherRun, code: ExitCode) -> None:
        """After this node's ranks ended with `code`, while its store is still there."""


def rank_server(loaded: Sequence[str] = RANKS_NEED) -> ForkServerContext:
    """Start it, deaf to signals to end; processes made by what is returned are forked from it.

    Service managers, schedulers and closed terminals send them to the whole group. The ranks follow
    their launcher, in order; if their server followed a signal, the kernel would kill them with it,
    in mid-step. To SIGTERM, by which the launcher asks, a rank opens its ears itself.
    """
    # Libraries that ask for devices while they are loaded: by CUDA itself, no fork could use it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(loaded))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        resource_tracker.ensure_running()  # else it is started below, and that unblocks SIGTERM
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


POLL_S = 0.05
GRACE_S = 10.0  # beyond the longest that a step's collective may wait for a member
SAME_WISH_S = 1.0
AGENT_SILENCE_S = 10.0  # an agent looks many times a second
LEARN_S = 1.0  # between two looks for nodes that joined
NAMED_RANKS = 8  # of those whose ends are told again when all have ended
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_log = logging.getLogger(__name__)


def supervise(
    spec: NodeSpec,
    body: Callable[[RankSpec], None] = rank_main,
    restart_hooks: RestartHooks | None = None,
) -> ExitCode:
    """Run this node's part of the job to its end; `body` is what its rank processes run.

    OK where at least one rank finished (others may have died on the way) or all ended on request;
    the worst rank's code otherwise. Raises ConfigError (another job meets there, or on other
    terms), HostError (port or ring directory taken, too many ranks for this machine, no such
    device), UnreachableError (no rendezvous) and DeniedError (another secret).
    """
    check_startable(spec.ranks_per_node, spec.world_size, node_limits())
    wanted, devices = spec.config.wanted_device, num_devices()
    device = choose_device(wanted, devices, spec.ranks_per_node)
    if device == "cuda":
        make_former(torch.device("cuda"))  # or nothing could be survived: better no rank starts
    host, port = split_address(spec.rendezvous)
    if spec.node_rank > 0:
        host, server = host_store_near(spec.rendezvous)
    else:
        server = host_store(host, port)
    _log.info("store=%s:%d", host, server.port)
    if not spec.key.is_secret:
        _log.warning("any process that reaches this port can change the job: it has no secret")
    own = SignedStore(server, spec.key)
    # Whatever can fail here fails before the others count on this node.
    claim = claim_directory(Path(spec.ring_dir), spec.config.job)
    try:
        if restart_hooks is not None:
            restart_hooks.open(own)
        met = meet(
            spec.rendezvous,
            node_rank=spec.node_rank,
            num_nodes=spec.num_nodes,
            own=f"{host}:{server.port}",
            device=device,
            terms=spec.terms,
            key=spec.key,
            after_run_id=0 if spec.node_rank else newest_run_id(spec.config),
        )
        own.set(SESSION_KEY, met.encode())  # for nodes that join
        if wanted == "auto":  # one kind for all nodes: that of node 0
            device = choose_device(met.device, devices, spec.ranks_per_node)
        log_device(device, wanted, devices=devices, ranks=len(spec.ranks))
        spec = replace(spec, config=replace(spec.config, device=device))
        supervisor = Supervisor(spec, met.addresses, met.run_id, body, met.key(spec.key))
        return run_ranks(supervisor, restart_hooks)
    finally:
        if claim >= 0:  # the directory's files stay for the agent to read to their end
            os.close(claim)


def run_ranks(supervisor: "Supervisor", restart_hooks: RestartHooks | None = None) -> ExitCode:
    """Start the ranks, watch them, end with them."""
    supervisor.first_run_id = 0 if restart_hooks is None else restart_hooks.first_run_id
    _on_stop(supervisor.ask_to_stop)
    try:
        supervisor.start()
        code = supervisor.watch()
        if restart_hooks is not None:
            restart_hooks.end(supervisor, code)
        return code
    finally:
        supervisor.kill_all()
        supervisor.stores.close()  # another run has its own


class Supervisor:
    """The watcher of one node's rank processes."""

    def __init__(
        self,
        spec: NodeSpec,
        addresses: tuple[str, ...],
        run_id: int,
        body: Callable[[RankSpec], None],
        key: JobKey,
    ) -> None:
        self.spec = spec
        self.key = key  # of this run
        self.run_id = run_id
        self.first_run_id = 0  # of the job, where this run is not its first
        self.body = body
        self.fenced: set[int] = set()
        self.addresses = addresses
        patience = FailureTimeouts(timeout_s=spec.config.peer_timeout_s)
        # A node that is frozen must not keep this one from ending who is.
        self.stores = Stores(addresses, max(patience.answer_s, LEAST_CONNECT_S), key)
        self.processes: dict[int, ForkServerProcess] = {}
        self.codes: dict[int, int] = {}  # exit codes of ended ranks; negative: signal
        self.stop_asked_s = 0.0
        self.over_s = 0.0  # since when some rank of the job has ended as all will
        self.is_told = False
        self.is_impatient = False  # asked to stop a second time
        self.is_watched = True  # until an agent fails to come, or to come again
        # Asked at every look until it says False: what else this launcher has to do.
        self.beside: Callable[[], bool] | None = None
        self.is_waiting = spec.seat is not None  # to be let into the job
        self._facts: str | None = None
        self._learnt_s = 0.0
        self._born_s = time.monotonic()
        self.ring = Ring.create(
            Path(spec.ring_dir),
            Attachment(
                job=spec.config.job,
                rank=spec.ranks[0],
                world_size=max(spec.world_size, spec.ranks.stop),
                pid=os.getpid(),
                role="supervisor",
                run_id=run_id,
            ),
            file_name=SUPERVISOR_RING,
        )

    def start(self) -> None:
        """Start all ranks, from a server that has torch loaded already."""
        for node in range(len(self.addresses)):
            self.stores.client(node)  # a death is told at once, not after connecting
        context = rank_server()
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
                        run_id=self.run_id,
                        is_newcomer=self.spec.seat is not None,
                        first_run_id=self.first_run_id,
                        key=self.key,
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
            self._look_for_nodes(time.monotonic())
            if self.beside is not None and not self.beside():
                self.beside = None
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
            _log.info("asked to end: all ranks do after their step")
            if not self.is_waiting:  # else the job is not this node's to end
                self.stores.append_everywhere(STOP_KEY, f"{self.spec.node_rank},")
            self._tell_to_stop()
        is_late = now_s - self.stop_asked_s > GRACE_S + self.spec.config.peer_timeout_s
        if self.is_impatient or (is_late and not self.over_s):  # over: its last checkpoint
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

    def _look_for_nodes(self, now_s: float) -> None:
        """Deaths here must be told to nodes that joined, too."""
        if now_s - self._learnt_s >= LEARN_S:
            self._learnt_s = now_s
            self._learn_nodes()

    def _learn_nodes(self) -> None:
        text = self.stores.read(self.spec.node_rank, JOB_KEY)
        if text is not None and text != self._facts:
            self._facts = text
            self.stores.learn(JobFacts.decode(text).addresses)

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
            _log.warning("rank=%d died: %s", rank, self._how(rank))
        group = self._last_group(rank)
        if code or group == NO_GROUP:  # others may count on it by now, and it never came in
            self._learn_nodes()  # one that joined a moment ago must hear of it, too
            self.stores.append_everywhere(DEATHS_KEY, notice(rank, group))

    def _last_group(self, rank: int) -> str:
        """What the rank said it belonged to; no group's name where that can not be known."""
        said = self.stores.read(self.spec.node_rank, group_key(rank))
        if self.spec.node_rank in self.stores.gone:
            return ""
        if said is None:
            return FIRST_GROUP if self.spec.seat is None else NO_GROUP
        return said

    def _fence(self) -> None:
        """Kill for good who was declared dead elsewhere: it must never wake up again."""
        declared = self.ring.command().dead_ranks
        for rank, process in self.processes.items():
            if rank in self.codes or rank in self.fenced:
                continue
            asked = self.stores.read(self.spec.node_rank, fence_key(rank))
            if asked is not None or rank in declared:
                why = f"for the others it was {asked}" if asked else "it was declared dead"
                _log.warning("rank=%d is fenced (killed): %s", rank, why)
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
        verdict = ExitCode(max(own, default=int(ExitCode.INTERNAL)))
        ends = [f"rank {rank}: {self._how(rank)}" for rank in sorted(self.codes)]
        more = len(ends) - NAMED_RANKS
        ends = ends[:NAMED_RANKS] + ([f"and {more} more"] if more > 0 else [])
        _log.error("no rank of this node finished (code %d): %s", verdict, ", ".join(ends))
        return verdict

    def _how(self, rank: int) -> str:
        """A rank's end, in words."""
        code = self.codes[rank]
        if code < 0:
            return f"signal {signal.Signals(-code).name}" + " (fenced)" * (rank in self.fenced)
        return f"exit code {code}" + " (the others went on without it)" * (code == LEFT_BEHIND)


def _run(body: Callable[[RankSpec], None], spec: RankSpec) -> None:
    """A rank's process. It inherits its server's deafness: `train` opens its ears."""
    body(spec)


def _on_stop(stop: Callable[[], None]) -> None:
    """A hang-up is a wish to end, too, unless it is to be ignored (nohup)."""
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: stop())


def _is_stopped(pid: int | None) -> bool:
    """Does the kernel keep it from running (SIGSTOP, a debugger)?"""
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state in ("T", "t")
    return False
