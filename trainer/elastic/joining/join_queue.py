"""What the leader knows of nodes that wait to join: read beside the training loop, never in it.

A thread with a connection of its own looks into the store of the leader's node. A store that is
silent or gone costs the loop nothing: then nobody waits, as far as the leader knows.
"""

import logging
import threading
import time
from collections.abc import Mapping

from torch.distributed import DistError

from pacekeeper.core.errors import DeniedError, PacekeeperError, UnreachableError, VersionError
from pacekeeper.trainer.elastic.agreement.job_key import UNSIGNED, JobKey
from pacekeeper.trainer.elastic.agreement.kv_store import connect_store
from pacekeeper.trainer.elastic.agreement.messages import (
    ASKING_KEY,
    Candidate,
    asking_key,
    decode_asking,
    number_in,
    unknown,
)
from pacekeeper.trainer.elastic.agreement.signed_store import SignedStore

_log = logging.getLogger(__name__)
LOOK_S = 0.5  # who has not asked again since the last look is not there any more


class JoinQueue:
    """`waiting`: the nodes that waited at the last look, by number."""

    def __init__(self, address: str, key: JobKey = UNSIGNED) -> None:
        self.waiting: tuple[Candidate, ...] = ()
        self._address, self._key = address, key
        self._beats: dict[int, int] = {}
        self._refused: set[str] = set()  # what they ask is not understood, or not signed

    def open(self) -> None:
        """Look from now on, until the process ends."""
        threading.Thread(target=self._watch, daemon=True, name="join-queue").start()

    def _watch(self) -> None:
        store: SignedStore | None = None
        while True:
            try:
                if store is None:
                    store = connect_store(self._address, key=self._key)
                self.waiting = self.poll(store)
            except (DistError, RuntimeError, UnreachableError):
                store, self.waiting = None, ()
            except DeniedError as error:
                self.waiting = ()
                self._log_refusal("a node", error)
            time.sleep(LOOK_S)

    def candidates(self, node_of: Mapping[int, int]) -> tuple[Candidate, ...]:
        """Of those the ones with numbers that nobody has had; `node_of` names who had them."""
        return unknown(self.waiting, node_of)

    def _log_refusal(self, node: str, error: PacekeeperError) -> None:
        if node not in self._refused:
            _log.warning("%s that wants to join is not heard: %s", node, error)
        self._refused.add(node)

    def poll(self, store: SignedStore) -> tuple[Candidate, ...]:
        """Who has asked, and has asked again since the last look."""
        if not store.check([ASKING_KEY]):
            return ()
        names = store.get(ASKING_KEY).decode(errors="replace").split(",")
        named = {number_in(name) for name in names}
        nodes = sorted(node for node in named if node is not None)
        found, beats = [], {}
        for node in nodes:
            if not store.check([asking_key(node)]):
                continue  # to ask for it would be to wait for it
            try:
                text = store.get(asking_key(node)).decode(errors="replace")
                candidate, beat = decode_asking(text)
            except (VersionError, DeniedError) as error:
                self._log_refusal(f"node={node}", error)
                continue
            before = self._beats.get(node, beat)
            if beat > before:  # a lower one is an earlier message, written again
                found.append(candidate)
            beats[node] = max(beat, before)
        self._beats = beats
        return tuple(found)
