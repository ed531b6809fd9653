"""What a running job and a node that wants to join tell each other, through stores. Values only.

Every node with a member keeps the facts of the job in its own store, so any live one is a way in. A
node that is ready asks in the store of the leader's node, again and again while it waits; what the
members then decide lies in the newcomer's own store: the verdict, and the group it follows.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Annotated, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, PlainValidator, TypeAdapter, ValidationError

from pacekeeper.core.addresses import split_address
from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import LostStateError, VersionError
from pacekeeper.core.layout.codec import decode_layout, encode_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.resize.shrink import RecoveryPlan
from pacekeeper.core.telemetry.shm_ring import MAX_RANKS
from pacekeeper.trainer.elastic.agreement.quorum import Count, Group, Rank
from pacekeeper.trainer.elastic.agreement.two_phase_commit import Progress

T = TypeVar("T")
MOST_SHOWN = 200  # characters of an error, which may quote what came


def _checked(address: str) -> str:
    split_address(address)
    return address


def _layout(text: object) -> Layout:
    if not isinstance(text, str):
        raise ValueError("expected text")
    return decode_layout(text.encode())


Address = Annotated[str, AfterValidator(_checked)]
KnownAddress = Annotated[str, AfterValidator(lambda text: text and _checked(text))]  # "": none is
WrittenLayout = Annotated[Layout, PlainValidator(_layout)]


def decode(what: str, text: str, kind: TypeAdapter[T]) -> T:
    """The value of this kind that the JSON in `text` is. Raises VersionError for anything else."""
    try:
        return kind.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        why = ": ".join([*map(str, first["loc"]), first["msg"]])
    raise VersionError(
        f"{what} say what this one does not understand: {why[:MOST_SHOWN]}",
        remedy="install the same pacekeeper on all nodes of the job; who else reaches them?",
    )


def number_in(text: str) -> int | None:
    """A rank's or node's number in words of ours; None for anything else."""
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_RANKS))):
        return None
    number = int(text)
    return number if number < MAX_RANKS else None


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

    run_id: Count
    first_run_id: Count
    generation: Count
    config: EngineConfig
    world_size: Annotated[int, Field(ge=1)]
    addresses: tuple[KnownAddress, ...]
    node_of: Mapping[Rank, Rank]
    members: tuple[Rank, ...]
    data_crc: Count

    def __post_init__(self) -> None:
        if not self.members or not set(self.members) <= set(self.node_of):
            raise ValueError(f"members {self.members!r:.40} of which some have no node")

    @property
    def leader_node(self) -> int:
        return self.node_of[self.members[0]]

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> "JobFacts":
        """Raises VersionError where the job's launchers are of another version."""
        return decode("the job's launchers", text, _FACTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A node whose ranks are ready: its number, its store, its ranks."""

    node: Rank
    address: Address
    ranks: tuple[Rank, ...]


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


@dataclass(frozen=True, slots=True)
class _Asking:
    candidate: Candidate
    beat: Count


@dataclass(frozen=True, slots=True)
class _Admission:
    group: Group
    verdict: str
    facts: JobFacts


def encode_asking(candidate: Candidate, beat: int) -> str:
    """`beat` grows as long as the node lives and waits."""
    return json.dumps(asdict(_Asking(candidate, beat)))


def decode_asking(text: str) -> tuple[Candidate, int]:
    """Raises VersionError for what no launcher of this version asks."""
    asked = decode("nodes that ask", text, _ASKING)
    return asked.candidate, asked.beat


def encode_admission(group: Group, verdict: str, facts: JobFacts) -> str:
    """`verdict` is the text that the agreement of `group` came to."""
    return json.dumps(asdict(_Admission(group, verdict, facts)))


def decode_admission(text: str) -> tuple[Group, str, JobFacts]:
    """The group to follow, the text of its verdict, and the job. Raises VersionError."""
    found = decode("the members", text, _ADMISSION)
    return found.group, found.verdict, found.facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a survivor publishes: progress, newest generation seen, its step and its last commit.

    `was_applied`: that commit changed the weights (False: skipped, a gradient was not finite).
    `was_silence`: it left because a member did not answer, not because something broke.
    """

    progress: Progress
    newest_generation: Count
    last_loss: float  # infinite, or no number: then the step was skipped
    was_applied: bool = True
    was_silence: bool = False
    step: Count = 0

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> "Report":
        """Raises VersionError."""
        return decode("other ranks", text, _REPORT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the stores hold of how the survivors go on.

    `commits`: ranks that commit their open ticket first, as the others did: with `last_loss`,
    applied or skipped. Then all stand at `ticket` and `step`. `restore`: then all go back to the
    first of these checkpoints that all read, or (`only_lost`) take from it what no living rank
    holds. `newcomers` come in; `base` is then the layout that the others come from, in which these
    have no part.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    layout: WrittenLayout
    restore: tuple[str, ...]
    commits: frozenset[Rank]
    last_loss: float
    was_applied: bool
    ticket: Count
    step: Count
    only_lost: bool = False
    newcomers: tuple[Candidate, ...] = ()
    base: WrittenLayout | None = None

    @property
    def members(self) -> tuple[int, ...]:
        return self.layout.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsensusDecision(Verdict):
    """How the survivors go on, in `group`. `text`: the verdict, as in the stores."""

    group: Group
    text: str


@dataclass(frozen=True, slots=True)
class _Lost:
    lost: str


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
    verdict = decode("the others", text, _VERDICT)
    if isinstance(verdict, _Lost):
        raise LostStateError(verdict.lost)
    layout = verdict.layout
    return ConsensusDecision(
        **{field.name: getattr(verdict, field.name) for field in fields(verdict)},
        group=group.followed_by(layout.generation, layout.ranks, text),
        text=text,
    )


_FACTS = TypeAdapter(JobFacts)
_ASKING = TypeAdapter(_Asking)
_ADMISSION = TypeAdapter(_Admission)
_REPORT = TypeAdapter(Report)
_VERDICT: TypeAdapter[Verdict | _Lost] = TypeAdapter(Verdict | _Lost)
