"""A case of placement as tests draw it, and what the planner makes of it."""

from pacekeeper.controller.planning.token_split.linear_program import Split
from pacekeeper.controller.planning.token_split.proportional import split_layers
from pacekeeper.controller.policy.failure_domains import SpreadFloor
from pacekeeper.controller.policy.replica_candidates import (
    ReplicaPlan,
    ReplicaRequest,
    plan_replicas,
)
from pacekeeper.core.layout.layout import Layout

Case = tuple[Layout, list[list[float]], dict[int, float], int]
"""Layout, loads[layer][expert], speed of each rank, slots per rank."""


def planned(
    case: Case,
    min_hosts: int,
    *,
    spread: SpreadFloor | None = None,
    move_s: float = 0.0,
    restart_s: float = 0.0,
    max_copies: int | None = None,
) -> tuple[tuple[Split, ...], ReplicaPlan | None]:
    """The best splits over the hosts there are, and the plan made from them: a second for a row."""
    layout, loads, speeds, slots = case
    splits = split_layers(layout, loads=loads, speeds=speeds)
    asked = placement_request(
        slots, min_hosts, spread=spread, move_s=move_s, restart_s=restart_s, max_copies=max_copies
    )
    return splits, plan_replicas(layout, splits, loads, speeds, asked)


def placement_request(
    slots: int,
    min_hosts: int,
    *,
    spread: SpreadFloor | None = None,
    move_s: float = 0.0,
    restart_s: float = 0.0,
    max_copies: int | None = None,
) -> ReplicaRequest:
    """A second for a row."""
    return ReplicaRequest(
        slots_per_rank=slots,
        min_hosts=min_hosts,
        spread=spread or SpreadFloor(),
        row_s=1.0,
        replica_s=0.0,
        num_steps=1,
        move_s=move_s,
        restart_s=restart_s,
        failure_probability=0.01,
        max_copies=max_copies,
    )


def hosts_after(case: Case, min_hosts: int, **prices: float) -> list[list[list[int]]]:
    """The ranks of each expert of each layer after the plan, ascending."""
    splits, plan = planned(case, min_hosts, **prices)  # type: ignore[arg-type]
    experts = plan.experts if plan else tuple(split.replicas for split in splits)
    return [[[host.rank for host in on] for on in layer] for layer in experts]
