"""The floor on distinct failure domains: what experts want, and how many have less. Pure.

Racks count only where all are known: a rank of no known rack may stand beside any other.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pacekeeper.controller.state.planning_snapshot import PlanningSnapshot
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.layout.layout import Layout, ReplicaSet
from pacekeeper.core.layout.replica_spread import DomainOf, domain_of_rank, domains_of_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadFloor:
    """Every expert stands on `least` distinct nodes (`domain_of`) and in `least_racks` distinct
    racks, or as many as it has hosts or there are.

    `rack_of`: of all ranks, or empty where racks are not known: then nobody asks for any.
    """

    least: int = 1
    domain_of: DomainOf = field(default_factory=dict)
    least_racks: int = 1
    rack_of: DomainOf = field(default_factory=dict)

    @property
    def levels(self) -> tuple[tuple[int, DomainOf], ...]:
        """What is asked of each kind of domain that is known."""
        nodes = (self.least, self.domain_of)
        return (nodes, (self.least_racks, self.rack_of)) if self.rack_of else (nodes,)

    @property
    def text(self) -> str:
        """The floor in words, after "fewer than"."""
        racks = f" or {self.least_racks} racks" if self.rack_of and self.least_racks > 1 else ""
        return f"{self.least} nodes{racks}"


def floor_of(view: PlanningSnapshot, config: PolicyConfig) -> SpreadFloor:
    """What is asked of experts now."""
    nodes = SpreadFloor(least=config.min_nodes, domain_of=view.node_of)
    if not view.rack_of or _without_rack(view):
        return nodes
    return replace(nodes, least_racks=config.min_racks, rack_of=view.rack_of)


def untold(view: PlanningSnapshot, config: PolicyConfig) -> str:
    """Whose silence keeps racks from being counted; empty: nobody's, or all are silent."""
    ranks = _without_rack(view)
    if not view.rack_of or not ranks or config.min_racks < 2:
        return ""
    nodes = sorted({str(domain_of_rank(view.node_of, rank)) for rank in ranks})
    return f"; racks are not counted: {', '.join(nodes)} told none"


def _without_rack(view: PlanningSnapshot) -> list[int]:
    return [rank for rank in view.layout.ranks if rank not in view.rack_of]


def num_narrow(layout: Layout, floor: SpreadFloor) -> int:
    """How many experts of all layers stand in fewer domains than the floor asks for."""
    return sum(_num_narrow(layout, layer, floor) for layer in range(layout.num_layers))


def _num_narrow(layout: Layout, layer: int, floor: SpreadFloor) -> int:
    ranks = layout.stage_of(layer).ranks
    names = [
        (least, {rank: domain_of_rank(domain_of, rank) for rank in ranks})
        for least, domain_of in floor.levels
    ]
    wanted = [(min(least, len(set(name.values()))), name) for least, name in names]
    return sum(
        any(len({name[host.rank] for host in on}) < min(least, len(on)) for least, name in wanted)
        for on in layout.experts[layer]
    )


def exposed(layout: Layout, floor: SpreadFloor) -> str:
    """What a node's or a rack's death would still take, to be added to a reason; empty: nothing."""
    left = num_narrow(layout, floor)
    if left:
        return (
            f"; experts on fewer than {floor.text}: {left} (where they lack one no replica can "
            "make room, or it would slow the step)"
        )
    num_nodes = len(domains_of_ranks(floor.domain_of, layout.working))
    if num_nodes < floor.least and len(layout.working) >= floor.least:
        where = "one node" if num_nodes == 1 else f"{num_nodes} nodes"
        return f"; all ranks are on {where}: experts can not stand on {floor.least}"
    return ""


def fatal(experts: Iterable[Iterable[ReplicaSet]], domain_of: DomainOf) -> set[object]:
    """The domains that would each take an expert along, all its hosts at once."""
    found: set[object] = set()
    for layer in experts:
        for hosts in layer:
            on = domains_of_ranks(domain_of, [host.rank for host in hosts])
            if len(on) == 1:
                found |= on
    return found
