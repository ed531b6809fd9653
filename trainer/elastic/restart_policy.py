"""Restarts a job: when all ranks of all nodes have ended, the launchers start it again.

Each launcher tells all stores how its ranks ended, and waits until it knows of every node with a
part in the job or of a reason to end (core/incidents/restart_policy.py). The next run is one of
the nodes that began the job and are left, as the lowest of them says: those that joined tell their
end, and may join again. It meets in a new store, at the same rendezvous or, without node 0, where
the lowest was.
"""

import contextlib
import logging
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pacekeeper.core.config.job import JobConfig
from pacekeeper.core.errors import ExitCode, UnreachableError, VersionError
from pacekeeper.core.incidents.restart_policy import (
    RestartAction,
    back_off_s,
    decide_restart,
    restart_nodes,
)
from pacekeeper.trainer.checkpoint.reader import complete_ids
from pacekeeper.trainer.checkpoint.storage import answered, below, open_storage
from pacekeeper.trainer.elastic.agreement.kv_store import STOP_KEY, Stores
from pacekeeper.trainer.elastic.agreement.messages import JOB_KEY, JobFacts, number_in
from pacekeeper.trainer.elastic.agreement.signed_store import SignedStore
from pacekeeper.trainer.elastic.launch_spec import NodeSpec, RankSpec
from pacekeeper.trainer.elastic.launcher import STOP_SIGNALS, LauncherRun, RestartHooks, supervise
from pacekeeper.trainer.elastic.loop import rank_main
from pacekeeper.trainer.elastic.rendezvous import RENDEZVOUS_TIMEOUT_S

ENDED_KEY = "ended"  # launchers append "NODE@CODE,"
RESTART_KEY = "restart"  # in node 0's store: the number of restarts before this run
NEXT_KEY = "next"  # in every launcher's: the nodes of the next run
_POLL_S = 0.2
_LOOK_PERIOD_S = 1.0
_ASKED = "asked to end: nothing is started again"
_log = logging.getLogger(__name__)


def supervise_with_restarts(
    spec: NodeSpec, body: Callable[[RankSpec], None] = rank_main
) -> ExitCode:
    """As `supervise`, and again up to `max_restarts` times where the whole job has ended."""
    restarts = Restarts(spec=spec)
    usual = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    while True:
        code = supervise(restarts.spec, body, restarts if spec.config.max_restarts else None)
        if not restarts.is_wanted:
            return code
        for number, handler in usual.items():
            signal.signal(number, handler)  # as before the first run: that of the last one is deaf
        if restarts.was_asked_to_end():  # since it was decided
            return code
        restarts.count()


@dataclass(frozen=True, kw_only=True)
class JoinedNodeHooks(RestartHooks):
    """What the launcher of a node that joined has to do with it: to say how its ranks ended.

    `is_told`: the others wait for that.
    """

    node: int
    first_run_id: int
    is_told: bool

    def open(self, own: SignedStore) -> None:
        """It meets nobody."""

    def end(self, ended: LauncherRun, code: ExitCode) -> None:
        """Say it to all, unless they do not know of this node."""
        if self.is_told and not ended.is_waiting:
            ended.stores.append_everywhere(ENDED_KEY, f"{self.node}@{int(code)},")


@dataclass(kw_only=True)
class Restarts(RestartHooks):
    """One launcher's part in starting a job again."""

    spec: NodeSpec
    first_run_id: int = 0
    number: int = 0
    is_wanted: bool = False
    ended: LauncherRun | None = None  # the last one
    facts: JobFacts | None = None  # the newest that any node knows of this run

    def was_asked_to_end(self) -> bool:
        """Was the last run's launcher?"""
        is_asked = self.ended is not None and bool(self.ended.stop_asked_s)
        if is_asked:
            _log.warning(_ASKED)
        return is_asked

    def count(self) -> None:
        """The next run begins."""
        self.number += 1
        self.is_wanted, self.facts = False, None

    def open(self, own: SignedStore) -> None:
        """Node 0 says which run its store is of; the others wait for a store of theirs.

        Raises UnreachableError where it does not come.
        """
        if self.spec.node_rank == 0:
            own.set(RESTART_KEY, str(self.number))
            return
        give_up_s = time.monotonic() + RENDEZVOUS_TIMEOUT_S
        stores = Stores((self.spec.rendezvous,), key=self.spec.key)
        while self.number and stores.read(0, RESTART_KEY) != str(self.number):
            if stores.gone:  # that of the run before, or none yet
                stores = Stores((self.spec.rendezvous,), key=self.spec.key)
            if time.monotonic() > give_up_s:
                raise UnreachableError(
                    f"node 0 did not start again at {self.spec.rendezvous}",
                    remedy="why is on its own terminal; start all launchers again",
                )
            time.sleep(_POLL_S)

    def end(self, ended: LauncherRun, code: ExitCode) -> None:
        """All ranks of this node have ended; is everything started again?"""
        own, stores, self.ended = self.spec.node_rank, ended.stores, ended
        self.first_run_id = self.first_run_id or ended.run_id
        stores.append_everywhere(ENDED_KEY, f"{own}@{int(code)},")
        if code is ExitCode.OK or ended.stop_asked_s:
            return
        if self.number >= self.spec.config.max_restarts:
            _log.error("all %d restarts are used up", self.number)
            return
        nodes = self._await_the_others(ended)
        if not nodes or not self._take_place(nodes, stores.addresses):
            return
        wait_s = back_off_s(self.number + 1)
        _log.warning(
            "restart %d of %d in %.0f s, from %s",
            self.number + 1,
            self.spec.config.max_restarts,
            wait_s,
            _beginning(self.spec.config),
        )
        until_s = time.monotonic() + wait_s
        while time.monotonic() < until_s and not ended.stop_asked_s:
            time.sleep(_POLL_S)
        self.is_wanted = not self.was_asked_to_end()

    def _await_the_others(self, run: LauncherRun) -> tuple[int, ...]:
        """The nodes of the next run, this one among them; none: it ends."""
        stores, said, looked_s = run.stores, "", -math.inf
        while True:
            now_s = time.monotonic()
            is_due = now_s - looked_s > _LOOK_PERIOD_S
            if is_due:
                looked_s = now_s
                self.poll_stores(stores)
            ended = parse_ends(stores.read(self.spec.node_rank, ENDED_KEY))
            chosen, why = decide_restart(self._nodes(), ended, stores.gone)
            nodes = (
                self._decided(stores, ended) if chosen is RestartAction.AGAIN and is_due else None
            )
            if chosen is RestartAction.AGAIN and not is_due:
                looked_s = -math.inf  # has another node joined those that ended since?
                continue
            if why != said:
                said = why
                _log.warning("this node's ranks have ended; %s", why)
            is_stopped = stores.read(self.spec.node_rank, STOP_KEY) is not None
            if run.stop_asked_s or is_stopped:
                _log.warning(_ASKED)
                return ()
            if nodes is not None or chosen is RestartAction.END:
                return nodes or ()
            time.sleep(_POLL_S)

    def _decided(self, stores: Stores, ended: Mapping[int, int]) -> tuple[int, ...] | None:
        """Who is part of the next run: the lowest of those says it, once, to all; None: not yet.

        Who answers may look different to each of them.
        """
        own, began = self.spec.node_rank, range(self.spec.num_nodes)
        said = stores.read(own, NEXT_KEY)
        if said is None:
            able = restart_nodes(began, self._nodes(), ended, stores.gone)
            if not able:
                away = sorted(stores.gone.intersection(began))
                _log.error("the launchers of nodes %s are gone: too few to start again", away)
                return ()
            if own != able[0]:
                return None
            said = ",".join(map(str, able))
            for node in able:
                said = stores.write_first(node, NEXT_KEY, said) or said
        return parse_next(said)

    def _take_place(self, nodes: tuple[int, ...], addresses: Sequence[str]) -> bool:
        """Be ready to start again with these nodes only; False where that can not be."""
        spec, own = self.spec, self.spec.node_rank
        left = sorted(set(range(spec.num_nodes)).difference(nodes))
        if not left:
            return True
        if own not in nodes:
            _log.error("nodes %s start again without this one: it did not answer", list(nodes))
            return False
        _log.warning("nodes %s are left behind: their launchers do not answer", left)
        try:
            self.spec = replace(
                spec,
                num_nodes=len(nodes),
                node_rank=nodes.index(own),
                rendezvous=spec.rendezvous if nodes[0] == 0 else addresses[nodes[0]],
            )
        except ValueError as error:
            _log.error("nodes %s alone can not start again: %s", list(nodes), error)
            return False
        return True

    def poll_stores(self, stores: Stores) -> None:
        """Who answers, and what they know of the job. A store without ranks says it on: it is a way
        in for nodes that want to join, and must not lead them to who is dead.
        """
        stores.probe(set(range(len(stores.addresses))) - stores.gone)
        own, before = self.spec.node_rank, self.facts
        for node in sorted(set(range(len(stores.addresses))) - stores.gone):
            text = stores.read(node, JOB_KEY)
            said = None if text is None else JobFacts.decode(text)
            if said is not None and (self.facts is None or said.generation > self.facts.generation):
                self.facts = said
        if self.facts is not None and self.facts is not before:
            stores.learn(self.facts.addresses)
            stores.write(own, JOB_KEY, self.facts.encode())

    def _nodes(self) -> set[int]:
        """With a part in the job, and this one."""
        own, facts = self.spec.node_rank, self.facts
        if facts is None:  # no group has stood yet
            return set(range(self.spec.num_nodes))
        return {own}.union(facts.node_of[rank] for rank in facts.members)


def _beginning(config: JobConfig) -> str:
    """What the next run begins with, as this node sees it."""
    if config.resume not in ("auto", "never"):
        return "the newest checkpoint"
    if not config.checkpoint_dir:
        return "step 0: the job saves no checkpoints"
    with contextlib.suppress(OSError):  # the ranks say so
        storage = open_storage(below(config.checkpoint_dir, config.job))
        look = partial(complete_ids, storage)
        if not answered(look, f"a list of {storage.root}", config.peer_timeout_s):
            return f"step 0: no checkpoint is in {config.checkpoint_dir}"
    return "the newest checkpoint"


def parse_ends(text: str | None) -> dict[int, int]:
    """How each node ended, in the value of ENDED_KEY. What names no node and code is nobody's."""
    parts = (part.partition("@") for part in (text or "").split(",") if part)
    named = ((number_in(node), number_in(code)) for node, _, code in parts)
    return {node: code for node, code in named if node is not None and code is not None}


def parse_next(text: str) -> tuple[int, ...]:
    """The nodes of the next run, in the value of NEXT_KEY. Raises VersionError."""
    found = [number_in(part) for part in text.split(",")]
    nodes = tuple(sorted({node for node in found if node is not None}))
    if len(nodes) < len(found):
        raise VersionError(
            f"another launcher says that nodes {text!r:.60} start again: these are none",
            remedy="install the same pacekeeper on all nodes of the job",
        )
    return nodes
