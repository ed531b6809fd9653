"""What a running job and a node that wants to join tell each other, through stores. Values only.

Every node with a member keeps the facts of the job in its own store, so any live one is a way in. A
node that is ready asks in the store of the leader's node, again and again while it waits; what the
members then decide lies in the newcomer's own store: the verdict, and the group it follows.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pacekeeper.core.addresses import host_and_port
from pacekeeper.core.config.controller import TrainConfig
from pacekeeper.core.config.loader import read_table
from pacekeeper.trainer.elastic.heard import flag_of, list_of, rank_of, text_of, understood, whole
from pacekeeper.trainer.elastic.quorum import Group

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
    """In the newcomer's own store: the checksum of this rank's corpus; it has its model, too."""
    return f"ready/{rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What a node must know of a job to join it.

    `first_life`: of the launch that began it (0: this one). `generation`: of the layout when this
    was said; of two facts of one life the newer one counts. `world_size`: ranks it began with.
    `addresses`: of each node's store, by number, empty where none is known. `node_of`: of every
    rank that ever was a member. `members`: those of now, ascending, and whoever is about to come
    in. `python`: its version; the text to train on is its standard library, `corpus` its checksum.
    """

    life: int
    first_life: int
    generation: int
    config: TrainConfig
    world_size: int
    addresses: tuple[str, ...]
    node_of: Mapping[int, int]
    members: tuple[int, ...]
    python: str
    corpus: int

    @property
    def leader_node(self) -> int:
        return self.node_of[self.members[0]]

    def encode(self) -> str:
        pairs = sorted(self.node_of.items())
        return json.dumps(asdict(self) | {"node_of": pairs, "config": asdict(self.config)})

    @classmethod
    def decode(cls, text: str) -> "JobFacts":
        """Raises VersionError where the job's launchers are of another version."""
        return understood("the job's launchers", text, cls._of)

    @classmethod
    def _of(cls, values: Any) -> "JobFacts":
        found = cls(
            life=whole(values["life"]),
            first_life=whole(values["first_life"]),
            generation=whole(values["generation"]),
            config=read_table(TrainConfig, dict(values["config"]), where="config"),
            world_size=whole(values["world_size"], 1),
            addresses=list_of(_address, values["addresses"]),
            node_of=dict(list_of(_pair, values["node_of"])),
            members=list_of(rank_of, values["members"]),
            python=text_of(values["python"]),
            corpus=whole(values["corpus"]),
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
        address = text_of(values["address"])
        host_and_port(address)
        ranks = list_of(rank_of, values["ranks"])
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
    return understood(
        "nodes that ask", text, lambda values: (Candidate.of(values), whole(values["beat"]))
    )


def encode_admission(group: Group, verdict: str, facts: JobFacts) -> str:
    """`verdict` is the text that the agreement of `group` came to."""
    return json.dumps({"group": asdict(group), "verdict": verdict, "facts": facts.encode()})


def decode_admission(text: str) -> tuple[Group, str, JobFacts]:
    """The group to follow, the text of its verdict, and the job. Raises VersionError."""
    return understood("the members", text, _admission)


def _admission(document: Any) -> tuple[Group, str, JobFacts]:
    values = document["group"]
    group = Group(
        generation=whole(values["generation"]),
        members=list_of(rank_of, values["members"]),
        name=text_of(values["name"]),
        electorates=list_of(lambda one: list_of(rank_of, one), values["electorates"]),
        line=list_of(text_of, values["line"]),
        has_stood=flag_of(values["has_stood"]),
    )
    return group, text_of(document["verdict"]), JobFacts.decode(text_of(document["facts"]))


def _address(value: Any) -> str:
    """Empty: not known."""
    address = text_of(value)
    if address:
        host_and_port(address)
    return address


def _pair(value: Any) -> tuple[int, int]:
    rank, node = value
    return rank_of(rank), rank_of(node)
