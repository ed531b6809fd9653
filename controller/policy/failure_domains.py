"""How many distinct nodes and racks each expert must be on, and how many experts are on fewer.

Called by the policy for every decision. Racks count only if the rack of every rank is known: a rank
without one may be in the rack of any other.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pacekeeper.controller.state.planning_snapshot import PlanningSnapshot
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import Exposure
from pacekeeper.core.layout.layout import Layout, ReplicaSet
from pacekeeper.core.layout.replica_spread import DomainOf, domain_of_rank, domains_of_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadFloor:
    """The number of distinct nodes and racks that each expert needs, if it has so many replicas.

    Attributes:
        least: required nodes, at most those that exist.
        domain_of: the node of each rank.
        least_racks: required racks, at most those that exist.
        rack_of: the rack of each rank; empty: racks are not known, and none are required.
    """

    least: int = 1
    domain_of: DomainOf = field(default_factory=dict)
    least_racks: int = 1
    rack_of: DomainOf = field(default_factory=dict)

    @property
    def levels(self) -> tuple[tuple[int, DomainOf], ...]:
        """Each known kind of domain, with the required number."""
        nodes = (self.least, self.domain_of)
        return (nodes, (self.least_racks, self.rack_of)) if self.rack_of else (nodes,)

    @property
    def text(self) -> str:
        """The floor in words, after "fewer than"."""
        racks = f" or {self.least_racks} racks" if self.rack_of and self.least_racks > 1 else ""
        return f"{self.least} nodes{racks}"


def floor_of(view: PlanningSnapshot, config: PolicyConfig) -> SpreadFloor:
    """Return the spread that the settings require of the experts of a snapshot."""
    nodes = SpreadFloor(least=config.min_nodes, domain_of=view.node_of)
    if not view.rack_of or _without_rack(view):
        return nodes
    return replace(nodes, least_racks=config.min_racks, rack_of=view.rack_of)


def nodes_without_rack(view: PlanningSnapshot, config: PolicyConfig) -> tuple[str, ...]:
    """Return the nodes without a rack that prevent the counting of racks.

    Empty where no node reports a rack, or where the settings require none.
    """
    ranks = _without_rack(view)
    if not view.rack_of or not ranks or config.min_racks < 2:
        return ()
    return tuple(sorted({str(domain_of_rank(view.node_of, rank)) for rank in ranks}))


def _without_rack(view: PlanningSnapshot) -> list[int]:
    return [rank for rank in view.layout.ranks if rank not in view.rack_of]


def num_narrow(layout: Layout, floor: SpreadFloor) -> int:
    """Return the number of experts of all layers that are in fewer domains than required."""
    return sum(_num_narrow(layout, layer, floor) for layer in range(layout.num_layers))


def _num_narrow(layout: Layout, layer: int, floor: SpreadFloor) -> int:
    ranks = layout.ranks_of_layer(layer)
    names = [
        (least, {rank: domain_of_rank(domain_of, rank) for rank in ranks})
        for least, domain_of in floor.levels
    ]
    wanted = [(min(least, len(set(name.values()))), name) for least, name in names]
    return sum(
        any(
            len({name[replica.rank] for replica in on}) < min(least, len(on))
            for least, name in wanted
        )
        for on in layout.experts[layer]
    )


def exposure_of(
    layout: Layout, floor: SpreadFloor, nodes_without_rack: tuple[str, ...] = ()
) -> Exposure:
    """Return the experts of a layout that the failure of one node or rack would lose.

    Args:
        layout: The layout after the decision.
        floor: The required spread.
        nodes_without_rack: Nodes that prevent the counting of racks.
    """
    if left := num_narrow(layout, floor):
        return Exposure(
            num_experts=left, required=floor.text, nodes_without_rack=nodes_without_rack
        )
    num_nodes = len(domains_of_ranks(floor.domain_of, layout.working))
    is_short = num_nodes < floor.least <= len(layout.working)
    return Exposure(
        num_nodes=num_nodes if is_short else None,
        min_nodes=floor.least if is_short else 0,
        nodes_without_rack=nodes_without_rack,
    )


def fatal_domains(experts: Iterable[Iterable[ReplicaSet]], domain_of: DomainOf) -> set[object]:
    """Return the domains whose failure would lose all replicas of some expert.

    Args:
        experts: experts[layer][expert] with their replicas.
        domain_of: The domain of each rank.
    """
    found: set[object] = set()
    for layer in experts:
        for replicas in layer:
            on = domains_of_ranks(domain_of, [replica.rank for replica in replicas])
            if len(on) == 1:
                found |= on
    return found
