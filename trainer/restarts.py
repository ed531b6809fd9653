"""The last rung: when all ranks of all nodes have ended, the launchers start the job again.

Each launcher tells all stores how its ranks ended, and waits until it knows of every node or of a
reason to end (core/restart.py). The next life meets at the same rendezvous, in a new store.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from pacekeeper.core.errors import ExitCode, UnreachableError
from pacekeeper.core.restart import Next, back_off_s, next_move
from pacekeeper.trainer.last_rung import LastRung, Life
from pacekeeper.trainer.loop import rank_main
from pacekeeper.trainer.node_spec import NodeSpec
from pacekeeper.trainer.rank import RankSpec
from pacekeeper.trainer.rendezvous import RENDEZVOUS_TIMEOUT_S
from pacekeeper.trainer.stores import STOP_KEY, connect_store
from pacekeeper.trainer.supervisor import supervise

ENDED_KEY = "ended"  # launchers append "NODE@CODE,"
RESTART_KEY = "restart"  # in node 0's store: the number of restarts before this life
_POLL_S = 0.2
_PROBE_PERIOD_S = 1.0
_log = logging.getLogger(__name__)


def supervise_to_the_end(spec: NodeSpec, body: Callable[[RankSpec], None] = rank_main) -> ExitCode:
    """As `supervise`, and again up to `max_restarts` times where the whole job has ended."""
    rung = Restarts(spec=spec)
    while True:
        code = supervise(spec, body, rung if spec.config.max_restarts else None)
        if not rung.is_wanted:
            return code
        rung.count()


@dataclass(kw_only=True)
class Restarts(LastRung):
    """One launcher's part in starting a job again."""

    spec: NodeSpec
    first_life: int = 0
    number: int = 0
    is_wanted: bool = False

    def count(self) -> None:
        """The next life begins."""
        self.number += 1
        self.is_wanted = False

    def open(self, server: TCPStore) -> None:
        """Node 0 says which life its store is of; the others wait for a store of theirs.

        Raises UnreachableError where it does not come.
        """
        if self.spec.node_rank == 0:
            server.set(RESTART_KEY, str(self.number))
            return
        give_up_s = time.monotonic() + RENDEZVOUS_TIMEOUT_S
        while self.number and not self._is_there():
            if time.monotonic() > give_up_s:
                raise UnreachableError(
                    f"node 0 did not start again at {self.spec.rendezvous}",
                    remedy="why is on its own terminal; start all launchers again",
                )
            time.sleep(_POLL_S)

    def _is_there(self) -> bool:
        try:
            store = connect_store(self.spec.rendezvous)
            if not store.check([RESTART_KEY]):
                return False
            return store.get(RESTART_KEY).decode() == str(self.number)
        except (UnreachableError, DistError):
            return False

    def end(self, ended: Life, code: ExitCode) -> None:
        """All ranks of this node have ended; is everything started again?"""
        own, stores = self.spec.node_rank, ended.stores
        self.first_life = self.first_life or ended.life
        stores.append_everywhere(ENDED_KEY, f"{own}@{int(code)},")
        if code is ExitCode.OK or ended.stop_asked_s:
            return
        if self.number >= self.spec.config.max_restarts:
            _log.error("all %d restarts are used up", self.number)
            return
        chosen = self._await_the_others(ended)
        if chosen is not Next.AGAIN:
            return
        wait_s = back_off_s(self.number + 1)
        _log.warning(
            "restart %d of %d in %.0f s, from the newest checkpoint",
            self.number + 1,
            self.spec.config.max_restarts,
            wait_s,
        )
        until_s = time.monotonic() + wait_s
        while time.monotonic() < until_s and not ended.stop_asked_s:
            time.sleep(_POLL_S)
        self.is_wanted = not ended.stop_asked_s

    def _await_the_others(self, life: Life) -> Next:
        stores, said, probed_s = life.stores, "", 0.0
        while True:
            now_s = time.monotonic()
            if now_s - probed_s > _PROBE_PERIOD_S:
                probed_s = now_s
                stores.probe(set(range(len(stores.addresses))) - stores.gone)
            num_nodes = len(stores.addresses)  # with those that joined: they start nothing again
            ended = parse_ends(stores.read(self.spec.node_rank, ENDED_KEY))
            chosen, why = next_move(num_nodes, ended, stores.gone)
            if why != said:
                said = why
                _log.warning("this node's ranks have ended; %s", why)
            is_stopped = stores.read(self.spec.node_rank, STOP_KEY) is not None
            if life.stop_asked_s or is_stopped:
                return Next.END
            if chosen is not Next.WAIT:
                return chosen
            time.sleep(_POLL_S)


def parse_ends(text: str | None) -> dict[int, int]:
    """How each node ended, in the value of ENDED_KEY."""
    parts = (part.partition("@") for part in (text or "").split(",") if part)
    return {int(node): int(code) for node, _, code in parts}
