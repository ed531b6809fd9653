"""After a death survivors re-host in a hurry; the next plan brings floors and alignment back."""

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.controller.planning.reliability import minimal_cut_sets, survival
from pacekeeper.controller.policy.decide import decide
from pacekeeper.controller.state.planning_snapshot import PlanHistory, PlanningSnapshot
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import MitigationLevel
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.resize.shrink import ReplicationFloor, shrink
from pacekeeper.core.telemetry.attachment import ModelShape
from pacekeeper.predictor.cost.features import FEATURES
from pacekeeper.predictor.cost.forecast import Workload
from pacekeeper.predictor.cost.model import CostModel
from support.layouts import on_nodes

NUM_LAYERS, NUM_EXPERTS, NUM_RANKS, SLOTS = 6, 16, 12, 5
NODE_OF = {rank: f"node-{rank // 2}" for rank in range(NUM_RANKS)}
FIRST = even_layout(
    ranks=range(NUM_RANKS),
    num_layers=NUM_LAYERS,
    num_experts=NUM_EXPERTS,
    replicas=2,
    domain_of=NODE_OF,
    generation=5,
)
# A model of which rows alone take time: one expert more on a rank costs nothing.
COSTS = np.zeros(len(FEATURES))
COSTS[[FEATURES.index("one"), FEATURES.index("expert_rows")]] = 0.1, 1e-3
MODEL = CostModel(
    coefficients=COSTS, covariance=np.zeros((len(FEATURES), len(FEATURES))), sigma=0.01
)
CONFIG = PolicyConfig()


def view_after(layout: Layout, *, expert_bytes: int = 1000) -> PlanningSnapshot:
    return PlanningSnapshot(
        layout=layout,
        shape=ModelShape(
            num_layers=NUM_LAYERS,
            num_experts=NUM_EXPERTS,
            experts_per_token=1,
            rows_per_step=120,
            slots_per_rank=SLOTS,
            expert_bytes=expert_bytes,
            dense_bytes=1000,
        ),
        model=MODEL,
        workload=Workload(
            num_rows=120,
            tokens=12000.0,
            sum_len_squared=1e6,
            loads=((100.0,) * NUM_EXPERTS,) * NUM_LAYERS,
        ),
        slow={},
        baseline=None,
        step_s=0.0,
        steps_since_plan=3,
        is_provisional=True,
        num_load_steps=3,
        next_generation=9,
        node_of=NODE_OF,
        by_survivors=True,
    )


def survived(layout: Layout) -> tuple[float, ...]:
    """The part of losses of 0, 1, 2 .. nodes that all layers together survive."""
    number = {name: at for at, name in enumerate(sorted({NODE_OF[r] for r in layout.ranks}))}
    hosts = [on for layer in layout.experts for on in layer]
    sets = minimal_cut_sets([number[NODE_OF[host.rank]] for host in on] for on in hosts)
    return survival(sets, len(number))


def survivors_layout() -> Layout:
    floor = ReplicationFloor(replicas=2, domain_of=NODE_OF, slots_per_rank=SLOTS)
    return shrink(FIRST, dead=[0, 1], generation=6, floor=floor)


def test_after_a_nodes_death_the_next_plan_regains_floors_and_alignment() -> None:
    left = survivors_layout()
    decision = decide(view_after(left), CONFIG)
    assert decision.level is MitigationLevel.MOVE_REPLICAS and decision.layout is not None
    assert min(map(min, on_nodes(decision.layout, NODE_OF))) >= 2
    before, after = survived(left), survived(decision.layout)
    assert after[1] == 1.0 and after[2] > 2.0 * before[2]
    assert "survives 100.0% of losses of 1" in decision.reason
    assert "gap" in decision.reason and "replicas are copied" in decision.reason
    later = replace(view_after(decision.layout), by_survivors=False, is_provisional=False)
    assert decide(replace(later, num_load_steps=100, steps_since_plan=100), CONFIG).layout is None


def test_where_losses_take_many_ranks_at_once_dearer_copies_are_worth_it() -> None:
    def is_moved(expert_bytes: int, *losses: float) -> bool:
        view = replace(
            view_after(survivors_layout(), expert_bytes=expert_bytes),
            history=PlanHistory(losses=losses),
        )
        return decide(view, CONFIG).moved_bytes > 0

    dear = next(size for size in (10**n for n in range(3, 16)) if not is_moved(size))
    assert not is_moved(dear, 0.3), "one loss is no habit"
    assert is_moved(dear, 0.3, 0.3)


def test_a_realignment_that_is_not_worth_its_copies_is_not_made() -> None:
    left = survivors_layout()
    assert decide(view_after(left, expert_bytes=10**12), CONFIG).moved_bytes == 0
    sure = replace(CONFIG, failure_probability=0.0)
    assert decide(view_after(left), sure).moved_bytes == 0


def test_a_layout_that_was_planned_is_not_realigned() -> None:
    planned = replace(view_after(survivors_layout()), by_survivors=False)
    assert decide(planned, CONFIG).moved_bytes == 0


def test_more_ranks_than_the_first_layout_had_are_used() -> None:
    wide = even_layout(
        ranks=range(NUM_RANKS + 2), num_layers=1, num_experts=4, replicas=1, generation=7
    )
    shape = replace(view_after(FIRST).shape, num_layers=1, num_experts=4)
    workload = replace(view_after(FIRST).workload, loads=((900.0, 1.0, 1.0, 1.0),))
    view = replace(
        view_after(wide), shape=shape, workload=workload, num_load_steps=100, steps_since_plan=100
    )
    decision = decide(replace(view, node_of={}), CONFIG)
    assert decision.level is MitigationLevel.MOVE_REPLICAS and decision.layout is not None
    assert any(host.rank >= NUM_RANKS for host in decision.layout.experts[0][0])


@pytest.mark.parametrize("limit", [1000, 5000])
def test_a_plan_moves_no_more_than_its_budget(limit: int) -> None:
    view = view_after(survivors_layout())
    assert decide(view, replace(CONFIG, max_moved_bytes=limit)).moved_bytes <= limit
