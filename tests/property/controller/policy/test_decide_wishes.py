"""What every decision keeps, whatever the layout, the loads and the speeds."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.controller.policy.decide import decide
from pacekeeper.controller.policy.pricing import Pricing
from pacekeeper.controller.state.planning_snapshot import PlanningSnapshot
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import MitigationLevel
from pacekeeper.core.layout.diff import diff_layouts
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.attachment import ModelShape
from pacekeeper.predictor.cost.features import BENDS, FEATURES
from pacekeeper.predictor.cost.forecast import Workload, forecast
from pacekeeper.predictor.cost.model import CostModel
from support.examples import examples
from support.layouts import with_shares


@st.composite
def views(draw: st.DrawFn) -> PlanningSnapshot:
    num_ranks, num_layers = draw(st.integers(2, 5)), draw(st.integers(1, 2))
    num_experts = draw(st.integers(1, 6))
    layout = even_layout(
        ranks=range(num_ranks),
        num_layers=num_layers,
        num_experts=num_experts,
        replicas=draw(st.integers(1, 2)),
    )
    load = st.one_of(st.just(0.0), st.floats(1.0, 5000.0))
    loads = st.lists(load, min_size=num_experts, max_size=num_experts).map(tuple)
    rows = draw(st.integers(1, 40))
    return PlanningSnapshot(
        layout=layout,
        shape=ModelShape(
            num_layers=num_layers,
            num_experts=num_experts,
            experts_per_token=1,
            rows_per_step=rows,
            slots_per_rank=draw(st.integers(1, num_experts)),
            expert_bytes=1000,
            dense_bytes=1000,
        ),
        model=None,
        workload=Workload(
            num_rows=rows,
            tokens=100.0 * rows,
            sum_len_squared=1e4 * rows,
            loads=tuple(draw(loads) for _ in range(num_layers)),
        ),
        slow=draw(st.dictionaries(st.sampled_from(layout.ranks), st.floats(1.1, 4.0))),
        baseline=draw(st.sampled_from([None, layout])),
        step_s=draw(st.floats(0.0, 5.0)),
        steps_since_plan=draw(st.sampled_from([0, 3, 100])),
        is_provisional=draw(st.booleans()),
        num_load_steps=draw(st.sampled_from([0, 100])),
        next_generation=draw(st.integers(2, 99)),
    )


configs = st.builds(
    PolicyConfig,
    min_gain=st.sampled_from([0.0, 0.05]),
    min_hosts=st.integers(1, 3),
    horizon_steps=st.sampled_from([1, 200]),
)


@settings(max_examples=examples(60))
@given(views(), configs)
def test_a_plan_pays_by_forecast_and_keeps_what_must_be_kept(
    view: PlanningSnapshot, config: PolicyConfig
) -> None:
    decision = decide(view, config)
    assert decision.reason
    if decision.layout is None:
        assert decision.level is MitigationLevel.NOTHING
        return
    layout = decision.layout
    assert layout.generation == view.next_generation
    assert layout.ranks == view.layout.ranks
    assert layout.mesh == view.layout.mesh
    speeds = {rank: 1.0 / view.slow.get(rank, 1.0) for rank in layout.ranks}

    def priced(which: object) -> float:
        assert which in (layout, view.layout)
        chosen = layout if which == layout else view.layout
        return forecast(chosen, model=None, workload=view.workload, speeds=speeds).step_s

    gain_s = priced(view.layout) - priced(layout)
    assert gain_s >= config.min_gain * decision.current_step_s - 1e-9
    assert gain_s * config.horizon_steps > decision.cost_s
    assert decision.planned_step_s == pytest.approx(decision.current_step_s - gain_s)
    least_s = min([decision.planned_step_s, *(one.planned_step_s for one in decision.considered)])
    assert decision.fluid_step_s <= least_s * (1.0 + 1e-9)
    assert len(diff_layouts(view.layout, layout)) * 1000 == decision.moved_bytes
    for before, after in zip(view.layout.experts, layout.experts, strict=True):
        for hosts, fresh in zip(before, after, strict=True):
            assert len(fresh) >= min(len(hosts), config.min_hosts)
    assert (decision.level is MitigationLevel.MOVE_REPLICAS) == (decision.moved_bytes > 0)


@settings(max_examples=examples(30))
@given(views(), configs)
def test_the_same_view_gives_the_same_decision(
    view: PlanningSnapshot, config: PolicyConfig
) -> None:
    assert decide(view, config) == decide(view, config)


@settings(max_examples=examples(30))
@given(views(), configs)
def test_a_layout_once_chosen_is_not_left_at_the_next_look(
    view: PlanningSnapshot, config: PolicyConfig
) -> None:
    config = replace(config, min_gain=0.05)
    decision = decide(view, config)
    if decision.layout is None:
        return
    after = replace(
        view, layout=decision.layout, step_s=decision.planned_step_s, is_provisional=False
    )
    again = decide(after, config)
    # A larger step may follow (a replica more where several pay), but never one that undoes it.
    assert again.layout is None or again.planned_step_s < decision.planned_step_s


@st.composite
def priced_layouts(draw: st.DrawFn) -> tuple[PlanningSnapshot, Layout]:
    """A job with a cost model, of a trainer that cuts micro-batches; other shares and ranks."""
    view = draw(views())
    ranks, num_experts = view.layout.ranks, len(view.workload.loads[0])
    size = draw(st.integers(1, len(ranks)))
    other = even_layout(
        ranks=ranks[:size],
        num_layers=len(view.workload.loads),
        num_experts=num_experts,
        replicas=draw(st.integers(1, size)),
    )
    weights = [draw(st.floats(0.1, 1.0)) for _ in range(size)]
    other = with_shares(other, *(weight / sum(weights) for weight in weights))
    units = [draw(st.floats(0.0, 1.0)) for _ in FEATURES]
    scale = [1.0, 1e-3, 1e-5, 1e-3, 0.1, 0.1, 1e-3, *[1e-3] * len(BENDS)]
    model = CostModel(
        coefficients=np.array(units) * scale,
        covariance=np.zeros((len(FEATURES), len(FEATURES))),
        sigma=0.02,
    )
    shape = replace(view.shape, rows_per_microbatch=draw(st.sampled_from([0, 1, 3, 16])))
    return replace(view, model=model, shape=shape), replace(other, standing_by=ranks[size:])


@settings(max_examples=examples(100))
@given(priced_layouts())
def test_no_layout_is_priced_below_the_bound(case: tuple[PlanningSnapshot, Layout]) -> None:
    view, layout = case
    pricing = Pricing(view, PolicyConfig())
    price, present = pricing.price(layout), pricing.price(view.layout)
    assert price.fluid_step_s == pytest.approx(present.fluid_step_s)
    assert price.fluid_step_s <= min(price.step_s, present.step_s) * (1.0 + 1e-9)
