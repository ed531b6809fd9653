"""A store and the state that it gives: it is opened and read to its end before anybody leads it."""

import contextlib
import logging
from pathlib import Path

from pacekeeper.controller.state_machine.state import State
from pacekeeper.controller.storage.restore import restored
from pacekeeper.controller.storage.store import Store

_log = logging.getLogger(__name__)


def open_past(path: Path, unix_offset_s: float) -> tuple[Store, State]:
    """Raises as `Store.open` does, and DamagedError where what stands there can not be read."""
    store = Store.open(path)
    with contextlib.ExitStack() as undone:
        undone.callback(store.close)
        jobs, incidents, next_id = store.load()
        waiting, next_proposal_id = store.open_proposals()
        state = restored(
            jobs,
            incidents,
            next_incident_id=next_id,
            waiting=waiting,
            next_proposal_id=next_proposal_id,
            standing=store.orders(),
            strikes=store.strikes(),
            unix_offset_s=unix_offset_s,
        )
        undone.pop_all()
    if jobs:
        _log.info("store=%s jobs=%d incidents=%d", path, len(jobs), len(incidents))
    return store, state
