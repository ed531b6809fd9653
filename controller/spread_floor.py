"""The floor on distinct failure domains: what experts want, and how many have less. Pure."""

from dataclasses import dataclass, field

from pacekeeper.core.layout import Layout
from pacekeeper.core.spread import DomainOf, domain, domains


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadFloor:
    """Every expert stands in `least` distinct domains, or as many as it has hosts or there are."""

    least: int = 1
    domain_of: DomainOf = field(default_factory=dict)

    def wanted(self, num_hosts: int, num_domains: int) -> int:
        """In how many domains an expert with so many hosts is to stand."""
        return min(self.least, num_hosts, num_domains)


def num_narrow(layout: Layout, floor: SpreadFloor) -> int:
    """How many experts of all layers stand in fewer domains than the floor asks for."""
    return sum(_num_narrow(layout, layer, floor) for layer in range(layout.num_layers))


def _num_narrow(layout: Layout, layer: int, floor: SpreadFloor) -> int:
    name = {rank: domain(floor.domain_of, rank) for rank in layout.stage_of(layer).ranks}
    num_domains = len(set(name.values()))
    return sum(
        len({name[host.rank] for host in hosts}) < floor.wanted(len(hosts), num_domains)
        for hosts in layout.experts[layer]
    )


def exposed(layout: Layout, floor: SpreadFloor) -> str:
    """What a node's death would still take, to be added to a reason; empty: nothing."""
    left = num_narrow(layout, floor)
    if left:
        return (
            f"; experts on fewer than {floor.least} nodes: {left} (where they lack one no replica "
            "can make room, or it would slow the step)"
        )
    num_nodes = len(domains(floor.domain_of, layout.working))
    if num_nodes < floor.least and len(layout.working) >= floor.least:
        where = "one node" if num_nodes == 1 else f"{num_nodes} nodes"
        return f"; all ranks are on {where}: experts can not stand on {floor.least}"
    return ""
