"""Rendezvous of a job's launchers in the store of node 0, whose address each of them knows.

A launcher with other terms is rejected: job, all settings but the device and paths, number of
nodes, ranks per node. A place (`--node-rank`) is claimed by compare-and-set, once. When all places
are taken, node 0 publishes the session: the run's number, the stores, and what each launcher drew
for this run alone, so that no message of an earlier run passes for one of this run. A request to
end is written into all stores before any rank is killed for being slow, so that every launcher
follows it.
"""

import contextlib
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

from pydantic import AfterValidator, Field, TypeAdapter

from pacekeeper.core.config.job import JobConfig
from pacekeeper.core.errors import ConfigError, DeniedError, UnreachableError
from pacekeeper.trainer.checkpoint.reader import ids
from pacekeeper.trainer.checkpoint.storage import answered, below, open_storage
from pacekeeper.trainer.elastic.agreement.job_key import UNSIGNED, JobKey
from pacekeeper.trainer.elastic.agreement.kv_store import Stores, connect_store
from pacekeeper.trainer.elastic.agreement.messages import Address, decode
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
SESSION_KEY = "session"  # in every node's store; signed with the job's key, all else with the run's
_TERMS_KEY = "terms"
_NAMED_NODES = 8  # of those that did not come

Terms = Mapping[str, object]
"""What must be the same on all nodes, by its name; `job` is among it. JSON values."""


def _with_job(terms: Terms) -> Terms:
    if not isinstance(terms.get("job"), str):
        raise ValueError("expected the name of a job")
    return terms


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A node's store, and a number that its launcher draws for this run alone."""

    address: Address
    nonce: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What node 0 decides for one run of the job: who runs it, where, under which number.

    Each launcher finds its own nonce in it, so it is none of an earlier run.

    Attributes:
        run_id: Unix milliseconds by node 0's clock.
        device: What node 0's ranks compute on.
        places: By node number.
    """

    run_id: Count
    device: Annotated[str, Field(pattern="^(cpu|cuda)$")]
    places: tuple[Place, ...]

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(place.address for place in self.places)

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> "Session":
        """Raises VersionError."""
        return decode("the launchers", text, _SESSION)

    def key(self, job: JobKey) -> JobKey:
        """Return the key of this run."""
        return job.of_session(self.encode())


_TERMS: TypeAdapter[Terms] = TypeAdapter(Annotated[dict[str, object], AfterValidator(_with_job)])
_PLACE = TypeAdapter(Place)
_SESSION = TypeAdapter(Session)


def meet(
    rendezvous: str,
    *,
    node_rank: int,
    num_nodes: int,
    own: str,
    device: str,
    terms: Terms,
    key: JobKey = UNSIGNED,
    after_run_id: int = 0,
) -> Session:
    """Meet at `rendezvous` with the address of one's `own` store; `key` is the job's.

    `after_run_id`: one that the new one must come after, whatever node 0's clock says. Raises
    ConfigError where another job meets there, on other terms, or another launcher has this place;
    UnreachableError where a node does not come, or node 0 goes or falls silent while it is waited;
    DeniedError where a launcher has another secret, or what it says is of an earlier run.
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
    stores = Stores((rendezvous,), key=key)
    places = [f"store/{node}" for node in range(num_nodes)]

    def read(name: str) -> str | None:
        text = stores.read(0, name)
        if stores.gone:
            raise UnreachableError(
                f"node 0 left the rendezvous {rendezvous}, or is frozen",
                remedy="why it ended is on its own terminal; start all launchers again",
            )
        return text

    def wait_for(name: str) -> str:
        while (text := read(name)) is None:
            if time.monotonic() > give_up_s:
                others = (node for node in range(num_nodes) if node != node_rank)
                missing = [node for node in others if read(places[node]) is None]
                raise UnreachableError(
                    f"{_named(missing or [0])} did not come to {rendezvous}",
                    remedy=f"start pacekeeper launch on all {num_nodes} nodes",
                )
            time.sleep(0.05)
        return text

    mine = Place(address=own, nonce=secrets.randbits(62))
    told = json.dumps(dict(terms))
    if node_rank == 0:
        stores.write(0, _TERMS_KEY, told)
    check_terms(rendezvous, wait_for(_TERMS_KEY), told)
    _take_place(stores, node_rank, mine)
    if node_rank == 0:
        come = (decode("the launchers", wait_for(place), _PLACE) for place in places)
        begun = Session(run_id=next_run_id(after_run_id), device=device, places=tuple(come))
        stores.write(0, SESSION_KEY, begun.encode())
    session = Session.decode(wait_for(SESSION_KEY))
    if dict(enumerate(session.places)).get(node_rank) != mine:
        raise DeniedError(
            f"what node 0 says at {rendezvous} is of another run: this node is not in it",
            remedy="start all launchers again; if it stays so, a stranger repeats earlier messages",
        )
    stores.close()
    return session


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


def _take_place(stores: Stores, node_rank: int, mine: Place) -> None:
    """Raises ConfigError where another launcher has it, living or dead."""
    text = stores.write_first(0, f"store/{node_rank}", json.dumps(asdict(mine)))
    if text is None:
        return  # who reads next says that node 0 is gone
    holder = decode("the launchers", text, _PLACE)
    if holder != mine:
        raise ConfigError(
            f"node-rank {node_rank}: taken by the launcher at {holder.address}",
            remedy="each node needs a --node-rank of its own; to come to a running job: --join",
        )


def _named(nodes: list[int]) -> str:
    more = f" and {len(nodes) - _NAMED_NODES} more" if len(nodes) > _NAMED_NODES else ""
    return f"nodes {nodes[:_NAMED_NODES]}{more}"
