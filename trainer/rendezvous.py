"""How the launchers of a job meet: in node 0's store, which each of them knows by its address."""

import time
from dataclasses import dataclass

from torch.distributed import DistError

from pacekeeper.core.errors import UnreachableError
from pacekeeper.trainer.stores import connect_store

RENDEZVOUS_TIMEOUT_S = 60.0
_LIFE_KEY = "life"
_CLOCK_KEY = "clock"
_NAMED_NODES = 8  # of those that did not come


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What all nodes know after it: every node's store, and what node 0 decided for all.

    `life` is Unix milliseconds by node 0's clock; `clock` is what its own ranks measure with.
    """

    addresses: tuple[str, ...]
    life: int
    clock: str


def meet(rendezvous: str, *, node_rank: int, num_nodes: int, own: str, clock: str) -> Meeting:
    """Meet at `rendezvous` with the address of one's `own` store.

    Raises UnreachableError where a node does not come, or node 0 goes while it is waited.
    """
    try:
        return _meet(rendezvous, node_rank, num_nodes, own, clock)
    except DistError as error:
        raise UnreachableError(
            f"node 0 left the rendezvous {rendezvous}: {str(error).splitlines()[0]}",
            remedy="why it ended is on its own terminal; start all launchers again",
        ) from None


def _meet(rendezvous: str, node_rank: int, num_nodes: int, own: str, clock: str) -> Meeting:
    give_up_s = time.monotonic() + RENDEZVOUS_TIMEOUT_S
    while True:
        try:
            store = connect_store(rendezvous)
            break
        except UnreachableError:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(0.2)
    if node_rank == 0:
        store.set(_LIFE_KEY, str(time.time_ns() // 1_000_000))
        store.set(_CLOCK_KEY, clock)
    store.set(f"store/{node_rank}", own)
    keys = [f"store/{node}" for node in range(num_nodes)]
    while not store.check(keys):
        if time.monotonic() > give_up_s:
            missing = [node for node, key in enumerate(keys) if not store.check([key])]
            raise UnreachableError(
                f"{_named(missing)} did not come to {rendezvous}",
                remedy=f"start pacekeeper launch on all {num_nodes} nodes",
            )
        time.sleep(0.05)
    return Meeting(
        addresses=tuple(store.get(key).decode() for key in keys),
        life=int(store.get(_LIFE_KEY)),
        clock=store.get(_CLOCK_KEY).decode(),
    )


def _named(nodes: list[int]) -> str:
    more = f" and {len(nodes) - _NAMED_NODES} more" if len(nodes) > _NAMED_NODES else ""
    return f"nodes {nodes[:_NAMED_NODES]}{more}"
