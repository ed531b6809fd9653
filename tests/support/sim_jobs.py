"""Small simulated jobs and random histories for them."""

from typing import Any

from hypothesis import strategies as st

from pacekeeper.simulator.cluster.history import (
    Change,
    History,
    NodesJoined,
    NodesLost,
    SpeedChanged,
    in_order,
)
from pacekeeper.simulator.jobs.data_parallel import JobModel
from pacekeeper.simulator.policies.base import Costs

# Whole seconds only, so that a walk second by second sees the same.
EXACT = Costs(
    notice_s=(1.0, 1.0),
    regroup_s=(2.0, 2.0),
    transfer_s=0.0,
    transfer_s_per_byte=0.0,
    restart_s=(7.0, 7.0),
    save_s_per_byte=0.5,
    grow_wait_s=4.0,
)


def small_job(**more: Any) -> JobModel:
    """Two layers of two experts; a checkpoint of 6 bytes."""
    known: dict[str, Any] = {
        "num_layers": 2,
        "num_experts": 2,
        "slots_per_node": 2,
        "samples_per_node": 3,
        "tokens_per_sample": 4,
        "balanced_step_s": 2.0,
        "expert_part": 0.5,
        "expert_bytes": 1,
        "dense_bytes": 2,
    }
    return JobModel(**known | more)


@st.composite
def histories(
    draw: st.DrawFn, *, most_nodes: int = 4, duration_s: int = 60, is_paced: bool = False
) -> History:
    """Nodes that come, go and perhaps slow down, at whole seconds."""
    there: set[int] = set()
    changes: list[Change] = []
    for at in sorted(draw(st.sets(st.integers(0, duration_s - 1), min_size=1, max_size=8))):
        away = sorted(set(range(most_nodes)) - there)
        is_loss: bool = draw(st.booleans())
        if there and is_loss:
            lost = draw(st.sets(st.sampled_from(sorted(there)), min_size=1))
            there -= lost
            changes.append(NodesLost(at_s=float(at), nodes=tuple(sorted(lost))))
        elif away:
            fresh = draw(st.sets(st.sampled_from(away), min_size=1))
            there |= fresh
            changes.append(NodesJoined(at_s=float(at), nodes=tuple(sorted(fresh))))
        if is_paced and there:
            node: int = draw(st.sampled_from(sorted(there)))
            speed: float = draw(st.sampled_from([0.25, 0.5, 1.0]))
            changes.append(SpeedChanged(at_s=float(at), node=node, speed=speed))
    return History(
        name="drawn",
        num_nodes=most_nodes,
        duration_s=float(duration_s),
        changes=in_order(changes),
    )
