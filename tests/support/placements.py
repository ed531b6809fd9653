"""A case of placement as tests draw it, and what the planner makes of it."""

from pacekeeper.controller.placement import place
from pacekeeper.controller.shares import Split, split_layers
from pacekeeper.core.layout import Layout

Case = tuple[Layout, list[list[float]], dict[int, float], int]
"""Layout, loads[layer][expert], speed of each rank, slots per rank."""


def placed(
    case: Case, min_hosts: int, move_cost: float = 0.0
) -> tuple[tuple[Split, ...], tuple[Split, ...]]:
    """The best splits over the hosts there are, and those of the placement made from them."""
    layout, loads, speeds, slots = case
    splits = split_layers(layout, loads=loads, speeds=speeds)
    result = place(
        layout,
        splits=splits,
        loads=loads,
        speeds=speeds,
        slots_per_rank=slots,
        min_hosts=min_hosts,
        move_cost=move_cost,
    )
    return splits, result
