"""Rendezvous of a job's launchers in the store of node 0, whose address each of them knows.

A launcher with other terms is rejected: job, all settings but the device and paths, number of
nodes, ranks per node. A place (`--node-rank`) is claimed by compare-and-set, once. A request to end
is written into all stores before any rank is killed for being slow, so that every launcher follows
it.
"""

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from pydantic import AfterValidator, TypeAdapter

from pacekeeper.core.addresses import split_address
from pacekeeper.core.config.job import JobConfig
from pacekeeper.core.errors import ConfigError, UnreachableError, VersionError
from pacekeeper.trainer.checkpoint.reader import ids
from pacekeeper.trainer.checkpoint.storage import answered, below, open_storage
from pacekeeper.trainer.elastic.agreement.kv_store import Stores, connect_store
from pacekeeper.trainer.elastic.agreement.messages import decode
from pacekeeper.trainer.elastic.agreement.quorum import Count

MOST_AHEAD_MS = 10 * 365 * 86_400_000  # of our clock: nothing was launched then


def next_run_id(after_run_id: int) -> int:
    """Of a launch that begins now: Unix milliseconds, but above that one, whatever the clock."""
    return max(_now_ms(), after_run_id + 1)


def newest_run_id(config: JobConfig) -> int:
    """Of a checkpoint of the job; 0 where there is none.

    With a clock that was set back, what this launch saves would be taken for older, and swept.
    """
    if not config.checkpoint_dir:
        return 0
    with contextlib.suppress(OSError):  # the ranks say so
        storage = open_storage(below(config.checkpoint_dir, config.job))
        found = answered(partial(ids, storage), f"a list of {storage.root}", config.peer_timeout_s)
        most = _now_ms() + MOST_AHEAD_MS
        return max((one.run_id for one in found if one.run_id <= most), default=0)
    return 0


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


RENDEZVOUS_TIMEOUT_S = 60.0
_RUN_ID_KEY = "run_id"
_DEVICE_KEY = "device"
_TERMS_KEY = "terms"  # the last one that node 0 sets before its own place
_NAMED_NODES = 8  # of those that did not come

Terms = Mapping[str, object]
"""What must be the same on all nodes, by its name; `job` is among it. JSON values."""


def _with_job(terms: Terms) -> Terms:
    if not isinstance(terms.get("job"), str):
        raise ValueError("expected the name of a job")
    return terms


_TERMS: TypeAdapter[Terms] = TypeAdapter(Annotated[dict[str, object], AfterValidator(_with_job)])
_COUNT: TypeAdapter[int] = TypeAdapter(Count)


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousResult:
    """What all nodes know after it: every node's store, and what node 0 decided for all.

    `run_id` is Unix milliseconds by node 0's clock; `device` is what its own ranks compute on.
    """

    addresses: tuple[str, ...]
    run_id: int
    device: str


def meet(
    rendezvous: str,
    *,
    node_rank: int,
    num_nodes: int,
    own: str,
    device: str,
    terms: Terms,
    after_run_id: int = 0,
) -> RendezvousResult:
    """Meet at `rendezvous` with the address of one's `own` store.

    `after_run_id`: one that the new one must come after, whatever node 0's clock says. Raises
    ConfigError where another job meets there, on other terms, or another launcher has this place;
    UnreachableError where a node does not come, or node 0 goes or falls silent while it is waited.
    """
    give_up_s = time.monotonic() + RENDEZVOUS_TIMEOUT_S
    while True:
        try:
            connect_store(rendezvous)
            break
        except UnreachableError:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(0.2)
    stores = Stores((rendezvous,))
    places = [f"store/{node}" for node in range(num_nodes)]

    def read(key: str) -> str | None:
        text = stores.read(0, key)
        if stores.gone:
            raise UnreachableError(
                f"node 0 left the rendezvous {rendezvous}, or is frozen",
                remedy="why it ended is on its own terminal; start all launchers again",
            )
        return text

    def wait_for(key: str) -> str:
        while (text := read(key)) is None:
            if time.monotonic() > give_up_s:
                others = (node for node in range(num_nodes) if node != node_rank)
                missing = [node for node in others if read(places[node]) is None]
                raise UnreachableError(
                    f"{_named(missing)} did not come to {rendezvous}",
                    remedy=f"start pacekeeper launch on all {num_nodes} nodes",
                )
            time.sleep(0.05)
        return text

    told = json.dumps(dict(terms))
    if node_rank == 0:
        run_id = next_run_id(after_run_id)
        for key, text in ((_RUN_ID_KEY, str(run_id)), (_DEVICE_KEY, device), (_TERMS_KEY, told)):
            stores.write(0, key, text)
    check_terms(rendezvous, wait_for(_TERMS_KEY), told)
    _take_place(stores, node_rank, own)
    met = RendezvousResult(
        addresses=tuple(_address(wait_for(place)) for place in places),
        run_id=decode("the launchers", wait_for(_RUN_ID_KEY), _COUNT),
        device=wait_for(_DEVICE_KEY),
    )
    stores.close()
    return met


def check_terms(rendezvous: str, told: str, own: str) -> None:
    """Raises ConfigError where they differ, VersionError where they are none."""
    theirs = decode("the launchers", told, _TERMS)
    ours: Terms = json.loads(own)
    if theirs["job"] != ours["job"]:
        raise ConfigError(
            f"job {theirs['job']!r} meets at {rendezvous}, not {ours['job']!r}",
            remedy="each job needs a --rendezvous of its own: another port of its node 0",
        )
    for name in (*theirs, *ours):
        if theirs.get(name) != ours.get(name):
            raise ConfigError(
                f"{name}: node 0 has {theirs.get(name)!r}, this node {ours.get(name)!r}",
                remedy="all launchers of a job need the same settings",
            )


def _address(text: str) -> str:
    """Raises VersionError."""
    try:
        split_address(text)
    except ValueError as error:
        raise VersionError(
            f"a launcher says where its store is: {error}",
            remedy="install the same pacekeeper on all nodes of the job",
        ) from None
    return text


def _take_place(stores: Stores, node_rank: int, own: str) -> None:
    """Raises ConfigError where another launcher has it, living or dead."""
    holder = stores.write_first(0, f"store/{node_rank}", own)
    if holder not in (own, None):  # None: who reads next says that node 0 is gone
        raise ConfigError(
            f"node-rank {node_rank}: taken by the launcher at {holder}",
            remedy="each node needs a --node-rank of its own; to come to a running job: --join",
        )


def _named(nodes: list[int]) -> str:
    more = f" and {len(nodes) - _NAMED_NODES} more" if len(nodes) > _NAMED_NODES else ""
    return f"nodes {nodes[:_NAMED_NODES]}{more}"
