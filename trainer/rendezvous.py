"""How the launchers of a job meet: in node 0's store, which each of them knows by its address.

Nobody is let in who would train something else: the launchers compare what they were told (the
terms), and each takes a place that nobody holds.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from pacekeeper.core.errors import ConfigError, UnreachableError
from pacekeeper.trainer.stores import connect_store

RENDEZVOUS_TIMEOUT_S = 60.0
_LIFE_KEY = "life"
_CLOCK_KEY = "clock"
_TERMS_KEY = "terms"  # the last one that node 0 sets before its own place
_NAMED_NODES = 8  # of those that did not come

Terms = Mapping[str, object]
"""What must be the same on all nodes, by its name; `job` is among it. JSON values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What all nodes know after it: every node's store, and what node 0 decided for all.

    `life` is Unix milliseconds by node 0's clock; `clock` is what its own ranks measure with.
    """

    addresses: tuple[str, ...]
    life: int
    clock: str


def meet(
    rendezvous: str, *, node_rank: int, num_nodes: int, own: str, clock: str, terms: Terms
) -> Meeting:
    """Meet at `rendezvous` with the address of one's `own` store.

    Raises ConfigError where another job meets there, on other terms, or another launcher has this
    place; UnreachableError where a node does not come, or node 0 goes while it is waited.
    """
    try:
        return _meet(rendezvous, node_rank, num_nodes, own, clock, terms)
    except DistError as error:
        raise UnreachableError(
            f"node 0 left the rendezvous {rendezvous}: {str(error).splitlines()[0]}",
            remedy="why it ended is on its own terminal; start all launchers again",
        ) from None


def _meet(
    rendezvous: str, node_rank: int, num_nodes: int, own: str, clock: str, terms: Terms
) -> Meeting:
    give_up_s = time.monotonic() + RENDEZVOUS_TIMEOUT_S
    while True:
        try:
            store = connect_store(rendezvous)
            break
        except UnreachableError:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(0.2)
    places = [f"store/{node}" for node in range(num_nodes)]

    def wait_for(keys: list[str]) -> None:
        while not store.check(keys):
            if time.monotonic() > give_up_s:
                others = (node for node in range(num_nodes) if node != node_rank)
                missing = [node for node in others if not store.check([places[node]])]
                raise UnreachableError(
                    f"{_named(missing)} did not come to {rendezvous}",
                    remedy=f"start pacekeeper launch on all {num_nodes} nodes",
                )
            time.sleep(0.05)

    told = json.dumps(dict(terms))
    if node_rank == 0:
        store.set(_LIFE_KEY, str(time.time_ns() // 1_000_000))
        store.set(_CLOCK_KEY, clock)
        store.set(_TERMS_KEY, told)
    wait_for([_TERMS_KEY])
    _check_terms(rendezvous, json.loads(store.get(_TERMS_KEY)), json.loads(told))
    _take_place(store, node_rank, own)
    wait_for(places)
    return Meeting(
        addresses=tuple(store.get(place).decode() for place in places),
        life=int(store.get(_LIFE_KEY)),
        clock=store.get(_CLOCK_KEY).decode(),
    )


def _check_terms(rendezvous: str, theirs: Terms, ours: Terms) -> None:
    """Raises ConfigError where they differ."""
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


def _take_place(store: Store, node_rank: int, own: str) -> None:
    """Raises ConfigError where another launcher has it, living or dead."""
    holder = store.compare_set(f"store/{node_rank}", "", own).decode()
    if holder != own:
        raise ConfigError(
            f"node-rank {node_rank}: taken by the launcher at {holder}",
            remedy="each node needs a --node-rank of its own; to come to a running job: --join",
        )


def _named(nodes: list[int]) -> str:
    more = f" and {len(nodes) - _NAMED_NODES} more" if len(nodes) > _NAMED_NODES else ""
    return f"nodes {nodes[:_NAMED_NODES]}{more}"
