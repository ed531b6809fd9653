"""What a running job and a node that wants to join tell each other, through stores. Values only.

Every node with a member keeps the facts of the job in its own store, so any live one is a way in. A
node that is ready asks in the store of the leader's node, again and again while it waits; what the
members then decide lies in the newcomer's own store: the verdict, and the group it follows.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from pacekeeper.core.addresses import split_address
from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.config.loader import read_table
from pacekeeper.core.errors import ConfigError, LostStateError, VersionError
from pacekeeper.core.layout.codec import decode_layout, encode_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.shrink import RecoveryPlan
from pacekeeper.core.telemetry.shm_ring import MAX_RANKS
from pacekeeper.trainer.elastic.agreement.quorum import Group
from pacekeeper.trainer.elastic.agreement.two_phase_commit import Phase, Progress

T = TypeVar("T")


MOST_SHOWN = 200  # characters of an error, which may quote what came


_GARBLE = (
    KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError,
    ConfigError,
)  # fmt: skip


def decode(what: str, text: str, read: Callable[[Any], T]) -> T:
    """`read` of the JSON in `text`. Raises VersionError where either does not go."""
    try:
        return read(json.loads(text))
    except _GARBLE as error:
        raise VersionError(
            f"{what} say what this one does not understand: {_short(error)}",
            remedy="install the same pacekeeper on all nodes of the job; who else reaches them?",
        ) from None


def as_int(value: Any, least: int = 0, most: int = 2**62) -> int:
    """An integer in this range. Raises TypeError, ValueError."""
    if type(value) is not int:
        raise TypeError(f"expected a whole number, got {_short(value)}")
    if not least <= value <= most:
        raise ValueError(f"expected {least} to {most}, got {_short(value)}")
    return value


def rank_of(value: Any) -> int:
    """A rank, or a node: a job has no more of them. Raises TypeError, ValueError."""
    return as_int(value, 0, MAX_RANKS - 1)


def as_str(value: Any) -> str:
    """Text. Raises TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {_short(value)}")
    return value


def as_bool(value: Any) -> bool:
    """True or False. Raises TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"expected true or false, got {_short(value)}")
    return value


def as_list(read: Callable[[Any], T], values: Any) -> tuple[T, ...]:
    """Each of a list. Raises TypeError, and as `read`."""
    if not isinstance(values, list):
        raise TypeError(f"expected a list, got {_short(values)}")
    return tuple(read(value) for value in values)


def number_in(text: str) -> int | None:
    """A rank's or node's number in words of ours; None for anything else."""
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_RANKS))):
        return None
    number = int(text)
    return number if number < MAX_RANKS else None


def _short(value: object) -> str:
    try:
        return repr(value)[:MOST_SHOWN]
    except (ValueError, RecursionError):  # an integer of more digits than are written
        return f"a {type(value).__name__} that can not be shown"


JOB_KEY = "job"  # in every node's store: the facts, as its ranks last knew them
ASKING_KEY = "asking"  # in the leader's: "NODE," of each node that has asked there
ADMISSION_KEY = "admission"  # in the newcomer's own


def asking_key(node: int) -> str:
    """In the leader's store: what this node asks, with a number that grows while it waits."""
    return f"asking/{node}"


def claim_key(node: int) -> str:
    """In the leader's store: who takes this node number and the rank numbers that go with it."""
    return f"claim/{node}"


def ready_key(rank: int) -> str:
    """In the newcomer's own store: the checksum of what this rank would train, once it has it."""
    return f"ready/{rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What a node must know of a job to join it.

    `first_run_id`: of the launch that began it (0: this one). `generation`: of the layout when this
    was said; of two facts of one run the newer one counts. `world_size`: ranks it began with.
    `addresses`: of each node's store, by number, empty where none is known. `node_of`: of every
    rank that ever was a member. `members`: those of now, ascending, and whoever is about to come
    in. `data_crc`: of the model, the data and the versions that they train with.
    """

    run_id: int
    first_run_id: int
    generation: int
    config: EngineConfig
    world_size: int
    addresses: tuple[str, ...]
    node_of: Mapping[int, int]
    members: tuple[int, ...]
    data_crc: int

    @property
    def leader_node(self) -> int:
        return self.node_of[self.members[0]]

    def encode(self) -> str:
        pairs = sorted(self.node_of.items())
        return json.dumps(asdict(self) | {"node_of": pairs})

    @classmethod
    def decode(cls, text: str) -> "JobFacts":
        """Raises VersionError where the job's launchers are of another version."""
        return decode("the job's launchers", text, cls._of)

    @classmethod
    def _of(cls, values: Any) -> "JobFacts":
        found = cls(
            run_id=as_int(values["run_id"]),
            first_run_id=as_int(values["first_run_id"]),
            generation=as_int(values["generation"]),
            config=read_table(EngineConfig, dict(values["config"]), where="config"),
            world_size=as_int(values["world_size"], 1),
            addresses=as_list(_address, values["addresses"]),
            node_of=dict(as_list(_pair, values["node_of"])),
            members=as_list(rank_of, values["members"]),
            data_crc=as_int(values["data_crc"]),
        )
        if not found.members or not set(found.members) <= set(found.node_of):
            raise ValueError(f"members {found.members!r:.40} of which some have no node")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A node whose ranks are ready: its number, its store, its ranks."""

    node: int
    address: str
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, values: Mapping[str, object]) -> "Candidate":
        """From what `asdict` and JSON made of one.

        Raises KeyError, TypeError, ValueError for anything else.
        """
        address = as_str(values["address"])
        split_address(address)
        ranks = as_list(rank_of, values["ranks"])
        return cls(node=rank_of(values["node"]), address=address, ranks=ranks)


def unknown(waiting: Collection[Candidate], node_of: Mapping[int, int]) -> tuple[Candidate, ...]:
    """Those with numbers that nobody has had; of two with the same the first."""
    nodes, ranks = set(node_of.values()), set(node_of)
    found = []
    for one in waiting:
        if one.node not in nodes and not ranks & set(one.ranks):
            found.append(one)
            nodes.add(one.node)
            ranks |= set(one.ranks)
    return tuple(found)


def widened(
    node_of: Mapping[int, int], stores: Sequence[str], newcomers: Collection[Candidate]
) -> tuple[dict[int, int], tuple[str, ...]]:
    """The node of each rank and the store of each node (empty: not known), with the newcomers."""
    address_of = {node: address for node, address in enumerate(stores) if address}
    every = dict(node_of)
    for one in newcomers:
        every |= dict.fromkeys(one.ranks, one.node)
        address_of[one.node] = one.address
    return every, tuple(address_of.get(node, "") for node in range(max(address_of) + 1))


def encode_asking(candidate: Candidate, beat: int) -> str:
    """`beat` grows as long as the node lives and waits."""
    return json.dumps(asdict(candidate) | {"beat": beat})


def decode_asking(text: str) -> tuple[Candidate, int]:
    """Raises VersionError for what no launcher of this version asks."""
    return decode(
        "nodes that ask", text, lambda values: (Candidate.of(values), as_int(values["beat"]))
    )


def encode_admission(group: Group, verdict: str, facts: JobFacts) -> str:
    """`verdict` is the text that the agreement of `group` came to."""
    return json.dumps({"group": asdict(group), "verdict": verdict, "facts": facts.encode()})


def decode_admission(text: str) -> tuple[Group, str, JobFacts]:
    """The group to follow, the text of its verdict, and the job. Raises VersionError."""
    return decode("the members", text, _admission)


def _admission(document: Any) -> tuple[Group, str, JobFacts]:
    values = document["group"]
    group = Group(
        generation=as_int(values["generation"]),
        members=as_list(rank_of, values["members"]),
        name=as_str(values["name"]),
        electorates=as_list(lambda one: as_list(rank_of, one), values["electorates"]),
        line=as_list(as_str, values["line"]),
        has_stood=as_bool(values["has_stood"]),
    )
    return group, as_str(document["verdict"]), JobFacts.decode(as_str(document["facts"]))


def _address(value: Any) -> str:
    """Empty: not known."""
    address = as_str(value)
    if address:
        split_address(address)
    return address


def _pair(value: Any) -> tuple[int, int]:
    rank, node = value
    return rank_of(rank), rank_of(node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a survivor publishes: progress, newest generation seen, its step and its last commit.

    `was_applied`: that commit changed the weights (False: skipped, a gradient was not finite).
    `was_silence`: it left because a member did not answer, not because something broke.
    """

    progress: Progress
    newest_generation: int
    last_loss: float
    was_applied: bool = True
    was_silence: bool = False
    step: int = 0

    def encode(self) -> str:
        return json.dumps(
            [
                self.progress.ticket,
                int(self.progress.phase),
                self.newest_generation,
                self.last_loss,
                self.was_applied,
                self.was_silence,
                self.step,
            ]
        )

    @classmethod
    def decode(cls, text: str) -> "Report":
        """Raises VersionError."""
        return decode("other ranks", text, cls._of)

    @classmethod
    def _of(cls, values: Any) -> "Report":
        ticket, phase, newest, loss, was_applied, was_silence, step = values
        return cls(
            progress=Progress(ticket=as_int(ticket), phase=Phase(as_int(phase))),
            newest_generation=as_int(newest),
            last_loss=_loss(loss),
            was_applied=as_bool(was_applied),
            was_silence=as_bool(was_silence),
            step=as_int(step),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsensusDecision:
    """How the survivors go on.

    `commits`: ranks that commit their open ticket first, as the others did: with `last_loss`,
    applied or skipped. Then all stand at `ticket` and `step`. `restore`: then all go back to the
    first of these checkpoints that all read, or (`only_lost`) take from it what no living rank
    holds. `newcomers` come in; `base` is then the layout that the others come from, in which these
    have no part. `text`: as in the stores.
    """

    group: Group
    layout: Layout
    restore: tuple[str, ...]
    commits: frozenset[int]
    last_loss: float
    was_applied: bool
    ticket: int
    step: int
    text: str
    only_lost: bool = False
    newcomers: tuple[Candidate, ...] = ()
    base: Layout | None = None

    @property
    def members(self) -> tuple[int, ...]:
        return self.layout.ranks


def write_verdict(
    chosen: RecoveryPlan,
    *,
    commits: Collection[int],
    furthest: Report,
    newcomers: Collection[Candidate],
    base: Layout | None,
) -> str:
    """The text of a verdict, given the report of a rank that none is ahead of."""
    document: dict[str, object] = {
        "layout": encode_layout(chosen.layout).decode(),
        "restore": chosen.restore,
        "only_lost": chosen.only_lost,
        "commits": sorted(commits),
        "last_loss": furthest.last_loss,
        "was_applied": furthest.was_applied,
        "ticket": furthest.progress.ticket,
        "step": furthest.step,
    }
    if newcomers:
        assert base is not None, "newcomers must know what the others hold"
        document["newcomers"] = [asdict(one) for one in newcomers]
        document["base"] = encode_layout(base).decode()
    return json.dumps(document)


def write_lost(error: LostStateError) -> str:
    """The text of the verdict that nobody can go on."""
    return json.dumps({"lost": str(error)})


def read_verdict(group: Group, text: str) -> ConsensusDecision:
    """What the agreement of `group` came to.

    Raises LostStateError where nobody can go on, VersionError for what is no verdict.
    """
    return decode("the others", text, lambda document: _verdict(group, document, text))


def _verdict(group: Group, document: Any, text: str) -> ConsensusDecision:
    if "lost" in document:
        raise LostStateError(as_str(document["lost"]))
    layout = decode_layout(document["layout"].encode())
    base = document.get("base")
    return ConsensusDecision(
        group=group.followed_by(layout.generation, layout.ranks, text),
        layout=layout,
        restore=as_list(as_str, document["restore"]),
        commits=frozenset(as_list(rank_of, document["commits"])),
        last_loss=_loss(document["last_loss"]),
        was_applied=as_bool(document["was_applied"]),
        ticket=as_int(document["ticket"]),
        step=as_int(document["step"]),
        text=text,
        only_lost=as_bool(document["only_lost"]),
        newcomers=as_list(Candidate.of, document.get("newcomers", [])),
        base=None if base is None else decode_layout(base.encode()),
    )


def _loss(value: Any) -> float:
    """It may be infinite, or no number: then the step was skipped."""
    if type(value) not in (int, float):
        raise TypeError(f"a loss of {value!r:.40}")
    return float(value)
