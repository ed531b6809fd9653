"""The launcher of a node that joins a running job: finds it, takes numbers, waits at its door.

Any live store of the job is a way in. The numbers are fresh ones, for the node and for its ranks:
what was said of the dead stays true. Until it is taken in, the job does not depend on this node.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pacekeeper.core.addresses import split_address
from pacekeeper.core.errors import (
    ConfigError,
    ExitCode,
    HostError,
    UnreachableError,
    VersionError,
)
from pacekeeper.core.incidents.rank_ranges import format_ranks
from pacekeeper.core.telemetry.shm_ring import MAX_RANKS
from pacekeeper.trainer.elastic.agreement.job_key import UNSIGNED, JobKey
from pacekeeper.trainer.elastic.agreement.kv_store import Stores, host_store_near
from pacekeeper.trainer.elastic.agreement.messages import (
    ADMISSION_KEY,
    ASKING_KEY,
    JOB_KEY,
    Candidate,
    JobFacts,
    asking_key,
    claim_key,
    encode_asking,
    number_in,
    ready_key,
)
from pacekeeper.trainer.elastic.agreement.signed_store import SignedStore
from pacekeeper.trainer.elastic.launch_spec import (
    NodeSpec,
    RankSpec,
    Seat,
    check_startable,
    node_limits,
)
from pacekeeper.trainer.elastic.launcher import Supervisor, run_ranks
from pacekeeper.trainer.elastic.loop import rank_main
from pacekeeper.trainer.elastic.rendezvous import SESSION_KEY, Session
from pacekeeper.trainer.elastic.restart_policy import JoinedNodeHooks
from pacekeeper.trainer.groups.devices import choose_device, log_device, num_devices
from pacekeeper.trainer.hooks.ring_writer import claim_directory

ASK_S = 0.2  # between two times that a node that waits says so
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSpec:
    """What a launcher that joins is started with; all else the job tells.

    `addresses`: HOST:PORT of stores of the job, some of which may be gone. `job`: the name the job
    must have; empty: any. `key`: of the job.
    """

    addresses: tuple[str, ...]
    ranks_per_node: int
    ring_dir: str
    run_dir: str = ""
    faults_dir: str = ""
    job: str = ""
    key: JobKey = UNSIGNED

    def __post_init__(self) -> None:
        if not self.addresses:
            raise ValueError("join: expected HOST:PORT of at least one node of the job")
        for address in self.addresses:
            try:
                split_address(address)
            except ValueError as error:
                raise ValueError(f"join: {error}") from None
        if self.ranks_per_node < 1:
            raise ValueError("a node has at least one rank")


def join(spec: JoinSpec, body: Callable[[RankSpec], None] = rank_main) -> ExitCode:
    """Run this node's part of a job that is running, to its end; as `supervise` otherwise.

    Raises ConfigError for a job of another name or on another Python, UnreachableError where no
    store answers, now or before this node was let in, HostError where this machine can not run the
    ranks, DeniedError where the job has another secret.
    """
    facts, met, session = find_job(spec.addresses, spec.key)
    key = session.key(spec.key)
    config = facts.config
    if spec.job not in ("", config.job):
        raise ConfigError(f"--job {spec.job}: the job at {met} is named {config.job}")
    check_startable(spec.ranks_per_node, len(facts.members) + spec.ranks_per_node, node_limits())
    devices = num_devices()
    device = choose_device(config.wanted_device, devices, spec.ranks_per_node)
    log_device(device, config.wanted_device, devices=devices, ranks=spec.ranks_per_node)
    claim = claim_directory(Path(spec.ring_dir), config.job)
    try:
        node, first = take_numbers(facts, spec.ranks_per_node, key)
        host, server = host_store_near(met)
        own = Candidate(
            node=node,
            address=f"{host}:{server.port}",
            ranks=tuple(range(first, first + spec.ranks_per_node)),
        )
        SignedStore(server, spec.key).set(SESSION_KEY, session.encode())
        _log.info("store=%s", own.address)
        _log.info("job=%s node=%d ranks=%s get ready to join", config.job, node, list(own.ranks))
        supervisor = Supervisor(
            NodeSpec(
                config=config,
                node_rank=node,
                num_nodes=node + 1,
                ranks_per_node=spec.ranks_per_node,
                rendezvous=met,
                ring_dir=spec.ring_dir,
                run_dir=spec.run_dir or f"runs/{config.job}",
                faults_dir=spec.faults_dir,
                seat=Seat(first_rank=first, world_size=facts.world_size, node_of=facts.node_of),
            ),
            (*facts.addresses, *[""] * (node - len(facts.addresses)), own.address),
            facts.run_id,
            body,
            key,
        )
        supervisor.beside = JoinRequest(supervisor, own).poll
        is_told = config.max_restarts > 0
        restart_hooks = JoinedNodeHooks(node=node, first_run_id=facts.first_run_id, is_told=is_told)
        return run_ranks(supervisor, restart_hooks)
    finally:
        if claim >= 0:
            os.close(claim)


def find_job(addresses: Sequence[str], key: JobKey = UNSIGNED) -> tuple[JobFacts, str, Session]:
    """The facts of the job, from the first of these stores that is one of its, its address, and the
    session that its values are signed for; `key` is the job's.

    Raises UnreachableError where none is, DeniedError where the job has another secret.
    """
    for address in addresses:
        text = Stores((address,), key=key).read(0, SESSION_KEY)
        if text is None:
            continue
        session = Session.decode(text)
        text = Stores((address,), key=session.key(key)).read(0, JOB_KEY)
        if text is not None:
            return JobFacts.decode(text), address, session
    raise UnreachableError(
        f"no job is running at {', '.join(addresses)}",
        remedy="give --join the HOST:PORT of a node whose ranks are training: "
        "`pacekeeper launch` logs the address of its store",
    )


def take_numbers(facts: JobFacts, num_ranks: int, key: JobKey = UNSIGNED) -> tuple[int, int]:
    """This node's number and that of its first rank, which no one else has or had.

    Raises UnreachableError where the leader's store does not answer, HostError where numbers ran
    out.
    """
    stores, home = Stores(facts.addresses, key=key), facts.leader_node
    node, first = len(facts.addresses), max(facts.node_of) + 1
    mine = f"{num_ranks} {os.getpid()} {time.time_ns()}"
    while first + num_ranks <= MAX_RANKS:
        taken = stores.write_first(home, claim_key(node), mine)
        if taken is None:
            raise UnreachableError(
                f"the store of node {home}, where the job's leader is, does not answer",
                remedy="its ranks go on without it in a moment: start this again",
            )
        if taken == mine:
            return node, first
        node, first = node + 1, first + numbers_taken(taken)
    raise HostError(
        f"the job has had {first} ranks, and {MAX_RANKS} is the most in one run",
        remedy="stop it and launch it again from its checkpoint",
    )


def numbers_taken(text: str) -> int:
    """How many ranks a claim is for. Raises VersionError for what is none."""
    number = number_in(text.partition(" ")[0])
    if not number:
        raise VersionError(
            f"a node that joins claims {text!r:.60}: that is no number of ranks",
            remedy="install the same pacekeeper on all nodes of the job",
        )
    return number


def _check_numbers(own: Candidate, facts: JobFacts) -> None:
    """Claims stand in one store, and another leader's knew none of ours.

    Raises HostError where others came in with our numbers first.
    """
    holder = dict(enumerate(facts.addresses)).get(own.node, "")
    if holder == own.address:
        return  # as is decided and not said to us yet
    taken = [rank for rank in own.ranks if rank in facts.node_of]
    if holder or taken:
        what = (
            f"node number {own.node} went to {holder}"
            if holder
            else f"ranks {format_ranks(taken)} are taken"
        )
        raise HostError(f"{what} meanwhile", remedy="start this again: it takes others")


class JoinRequest:
    """This node, as it asks to be let in."""

    def __init__(self, supervisor: Supervisor, own: Candidate) -> None:
        self._supervisor = supervisor
        self._stores = supervisor.stores
        self._own = own
        self._beat = 0
        self._asked_at: set[int] = set()
        self._next_s = 0.0

    def poll(self) -> bool:
        """Ask, if it is time; False once there is nothing to ask for any more.

        Raises UnreachableError where the job is gone, HostError where another took our numbers,
        ConfigError where this node would train something else.
        """
        own, now_s = self._own, time.monotonic()
        if self._stores.read(own.node, ADMISSION_KEY) is not None:
            _log.info("node=%d is let in", own.node)
            self._supervisor.is_waiting = False
            return False
        if self._supervisor.codes:
            ended = sorted(self._supervisor.codes)
            _log.error("ranks %s ended before they were let in: this node does not join", ended)
            self._supervisor.kill_all()
            return False
        if now_s < self._next_s or self._supervisor.stop_asked_s:
            return True
        self._next_s = now_s + ASK_S
        texts = [self._stores.read(own.node, ready_key(rank)) for rank in own.ranks]
        if None in texts:
            return True
        facts = self._read_job_facts()
        if set(texts) != {str(facts.data_crc)}:
            raise ConfigError(
                "the data, model, settings or installation here are not those of the job",
                remedy="use the same files and versions on all nodes",
            )
        leader = facts.leader_node
        self._beat += 1
        self._stores.write(leader, asking_key(own.node), encode_asking(own, self._beat))
        if leader not in self._asked_at:
            self._stores.append(leader, ASKING_KEY, f"{own.node},")
            self._asked_at.add(leader)
            _log.info("node=%d is ready and asks at node %d to be let in", own.node, leader)
        return True

    def _read_job_facts(self) -> JobFacts:
        """What the job says of itself now, by any of its stores."""
        own = self._own
        for node in range(len(self._stores.addresses)):
            text = None if node == own.node else self._stores.read(node, JOB_KEY)
            if text is None:
                continue
            facts = JobFacts.decode(text)
            self._stores.learn(facts.addresses)
            _check_numbers(own, facts)
            return facts
        raise UnreachableError(
            "the job ended, or is out of reach, before this node was let in",
            remedy="`pacekeeper status` tells how it ended",
        )
