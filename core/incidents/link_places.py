"""Places that findings of slow links name: a pair, a port, a node, the fabric, all links. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from pacekeeper.core.incidents.rank_ranges import format_ranks


class PlaceKind(StrEnum):
    """The kind of a place, from the most specific to the most general."""

    PAIR = "pair"  # between two ranks
    PORT = "port"  # of one rank
    NODE_PAIR = "node pair"  # between two nodes, one of them with several ranks
    NODE = "node"  # between a node with several ranks and all others
    FABRIC = "fabric"  # between all nodes; inside the node where there is only one
    ALL = "all links"  # between nodes and inside them: hosts, software, other load


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class LinkPlace:
    """A place of a fabric.

    Attributes:
        kind: Its kind.
        ranks: The rank of a port, both ranks of a pair, all ranks of a node; else empty.
        nodes: The node or nodes; empty for the fabric and for all links.
    """

    kind: PlaceKind
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()

    def __str__(self) -> str:
        match self.kind:
            case PlaceKind.PORT:
                return f"the port of rank {self.ranks[0]} on {self.nodes[0]}"
            case PlaceKind.PAIR:
                return f"the link between ranks {self.ranks[0]} and {self.ranks[1]}"
            case PlaceKind.NODE:
                return f"the link of node {self.nodes[0]} (ranks {format_ranks(self.ranks)})"
            case PlaceKind.NODE_PAIR:
                return f"the link between nodes {self.nodes[0]} and {self.nodes[1]}"
            case PlaceKind.FABRIC:
                return "the fabric that all share"
            case PlaceKind.ALL:
                return "all links, inside nodes and between them"
