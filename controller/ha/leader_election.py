"""One of several controllers: it stands by with a copy of the state, leads, and stands by again.

Who leads opens its own store and serves as a single controller does, in the term of its lease; a
leader that lost its lease tells nobody anything any more, ends its streams and follows the next.
"""

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pacekeeper.controller.api.auth.listeners import bind_error, reject_unprotected_listeners
from pacekeeper.controller.app.controller import Controller
from pacekeeper.controller.ha.backends import open_lease_store
from pacekeeper.controller.ha.lease import ElectionMember, Timing
from pacekeeper.controller.ha.lease_renewer import LeaseRenewer
from pacekeeper.controller.ha.replica import Replica
from pacekeeper.controller.ha.replication_server import ReplicationServer
from pacekeeper.controller.ha.standby_server import open_standby, pause
from pacekeeper.controller.storage import replica_marker
from pacekeeper.controller.storage.change_log import Change
from pacekeeper.controller.storage.sqlite_file import DamagedError
from pacekeeper.controller.storage.store import Store
from pacekeeper.core.addresses import join_address, split_address
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.errors import ConfigError, HostError, listen_error
from pacekeeper.protos import replication_pb2_grpc

LOOK_S = 0.05  # between two looks whether it leads
FOLLOW_AGAIN_S = 0.5
STORE_AGAIN_S = 10.0  # after a copy could not be stored: each attempt takes a whole snapshot
_log = logging.getLogger(__name__)


class LeaseLeadership:
    """The office of one term."""

    def __init__(self, keeper: LeaseRenewer, term: int, config: ControllerConfig) -> None:
        self._keeper, self._term, self._config = keeper, term, config
        self.answer_within_s = config.lease.duration_s
        self.copies: ReplicationServer | None = None

    def opened(self, store: Store) -> None:
        """Standbys will have copies of it."""
        store.name_copy(store.copy[0], self._term)
        store.journal.is_kept = True
        within_s = self._config.lease.sync_within_s
        self.copies = ReplicationServer(
            store, self._keeper, term=self._term, sync_within_s=within_s
        )

    def term(self) -> int | None:
        """None as soon as the lease is not sure any more, or is of another term."""
        return self._term if self._keeper.term() == self._term else None

    def describe_newer_term(self, seen: int) -> str:
        """The lease's store has forgotten terms, or the agent's file lies."""
        told = f"term {seen} was seen, this is {self._term}"
        if self._keeper.observe_term(seen):
            return f"{told}: a later one is begun"
        return (
            f"{told}, and that is not believed now: if it stays so, delete `controller-term` in "
            "the ring directory of that node and start its agent again"
        )

    async def ship(self, changes: Sequence[Change]) -> None:
        """To all copies that count."""
        assert self.copies is not None, "the store is open"
        await self.copies.ship(changes)

    def serve(self, server: Any) -> None:
        """Standbys follow here."""
        replication_pb2_grpc.add_ReplicationServiceServicer_to_server(self.copies, server)


async def run(config: ControllerConfig) -> None:
    """Until SIGTERM or SIGINT. Raises as `Controller.run` does, and ConfigError for the lease."""
    reject_unprotected_listeners(config)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    host, port = split_address(config.listen, first_port=0)
    if not port:
        port = _free_port(host)
        config = replace(config, listen=join_address(host, port))
    member = ElectionMember(
        name=config.lease.member or socket.gethostname(),
        life=secrets.token_hex(8),
        address=_advertised(config),
        timing=Timing(
            duration_s=config.lease.duration_s,
            renew_s=config.lease.renew_s,
            margin_s=config.lease.margin_s,
        ),
    )
    keeper = LeaseRenewer(member, open_lease_store(config.lease))
    keeper.start()
    damage = ""
    try:
        while not stop.is_set():
            term = await _stand_by(config, keeper, member, stop, damage)
            if term is not None:
                damage = await _lead(config, keeper, term, stop)
    finally:
        await asyncio.to_thread(keeper.close)
    _log.info("stopped")


async def _stand_by(
    config: ControllerConfig,
    keeper: LeaseRenewer,
    member: ElectionMember,
    stop: asyncio.Event,
    damage: str,
) -> int | None:
    """Follow whoever leads until this one does: its term. None: it shall stop.

    `damage`: what is known to be wrong with its copy.
    """
    copy: Replica | None = None

    def why() -> str:
        record = keeper.record
        unfit = " (without a whole copy of the store)" if copy and copy.damage else ""
        if record is None or not record.address:
            return f"this controller stands by{unfit}, and none leads now"
        return f"this controller stands by{unfit}; the last to lead is {record.address}"

    server, port = await open_standby(config, config.listen, why)
    if not port:
        raise listen_error(
            config.listen,
            bind_error(*split_address(config.listen)),
            option="--listen",
            rival="another controller",
        )
    with contextlib.suppress(OSError):  # nobody reads it any more, or the disk is full
        print(f"listening on {config.listen}", flush=True)
    _log.info("member=%s stands by", member.name)
    copy = Replica(Path(config.store), keeper.set_eligible, damage)
    if copy.damage:
        _log.warning("%s", copy.damage)
    following = asyncio.create_task(_follow(config, keeper, member, copy))
    try:
        while not stop.is_set():
            if following.done():
                following.result()  # raises: our bug
            if (term := keeper.term()) is not None:
                return term
            await pause(stop, LOOK_S)
        return None
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
        copy.close()
        await server.stop(None)


async def _follow(
    config: ControllerConfig, keeper: LeaseRenewer, member: ElectionMember, copy: Replica
) -> None:
    said = ""
    while True:
        record, again_s = keeper.record, FOLLOW_AGAIN_S
        if record is not None and record.life not in ("", member.life) and record.address:
            try:
                why = await copy.follow(record.address, member.name, config.tls)
            except HostError as error:
                why, again_s = str(error), STORE_AGAIN_S
            if why != said:
                level = logging.INFO if again_s == FOLLOW_AGAIN_S else logging.WARNING
                _log.log(level, "leader=%s not followed any more: %s", record.address, why)
            said = why
        await asyncio.sleep(again_s)


async def _lead(
    config: ControllerConfig, keeper: LeaseRenewer, term: int, stop: asyncio.Event
) -> str:
    """Serve as the only one, while the lease lasts. What is damaged of its copy, where that keeps
    it from leading; raises DamagedError where it is no copy.
    """
    office = LeaseLeadership(keeper, term, config)
    try:
        controller = Controller(config, office)
    except DamagedError as error:
        if replica_marker.read_marker(Path(config.store)) is None:
            raise
        keeper.set_eligible(None)
        return error.what
    try:
        over = asyncio.Event()
        watching = asyncio.create_task(_watch(office, stop, over))
        try:
            assert office.copies is not None, "the store is open"
            naming = asyncio.create_task(office.copies.begin())
            await asyncio.wait({naming, watching}, return_when=asyncio.FIRST_COMPLETED)
            naming.cancel()
            await controller.serve(over)
        finally:
            watching.cancel()
    finally:
        if not stop.is_set():
            keeper.resign()
    return ""


async def _watch(leadership: LeaseLeadership, stop: asyncio.Event, over: asyncio.Event) -> None:
    """Sets `over` when it shall stop, or leads no more."""
    while not stop.is_set() and leadership.term() is not None:
        await pause(stop, LOOK_S)
    over.set()


def _advertised(config: ControllerConfig) -> str:
    """Raises ConfigError where nobody else could call what it listens on."""
    if config.lease.advertise:
        return config.lease.advertise
    host, _ = split_address(config.listen)
    if host in ("0.0.0.0", "::", "*"):
        raise ConfigError(
            f"--listen {config.listen} is no address that the other controllers could call",
            remedy="name one: [lease] advertise",
        )
    return config.listen


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
