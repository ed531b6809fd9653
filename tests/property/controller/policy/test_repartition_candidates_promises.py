"""What every decision for stages and tensor groups keeps, whatever is slow; and the way back."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.controller.planning.partition.constraints import check_partition
from pacekeeper.controller.policy.decide import decide
from pacekeeper.controller.policy.partition_inputs import as_partition
from pacekeeper.controller.policy.pricing import Pricing
from pacekeeper.controller.state.planning_snapshot import PlanningSnapshot
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import STATE_MOVING_LEVELS, Decision, MitigationLevel
from pacekeeper.core.layout.codec import decode_layout, encode_layout
from support.examples import examples
from support.partitioned import staged_layout, view_of, work_of

MIN_PLANS = 0.2  # of all examples: a policy that never plans must not pass


@st.composite
def views(draw: st.DrawFn) -> PlanningSnapshot:
    stages, data, tensor = draw(
        st.sampled_from([(1, 2, 2), (2, 1, 1), (2, 2, 2), (2, 2, 1), (3, 1, 2), (2, 1, 4)])
    )
    layout = staged_layout(
        stages=stages,
        data=data,
        tensor=tensor,
        layers=draw(st.integers(stages, 7)),
        experts=draw(st.sampled_from([0, 4])),
    )
    slow = draw(
        st.dictionaries(st.sampled_from(layout.ranks), st.sampled_from([1.15, 1.6, 3.0, 20.0]))
    )
    return replace(
        view_of(
            layout,
            slow=slow,
            baseline=layout if slow else None,
            microbatches=draw(st.sampled_from([1, 4])),
            rows=draw(st.sampled_from([8, 64])),
        ),
        step_s=draw(st.sampled_from([0.0, 6.0])),
        slow_steps=draw(st.sampled_from([None, 1, 100])),
        node_of={rank: f"node-{rank // 4}" for rank in layout.ranks},
    )


configs = st.builds(
    PolicyConfig,
    min_gain=st.sampled_from([0.0, 0.05]),
    min_nodes=st.sampled_from([1, 2]),
    horizon_steps=st.sampled_from([1, 200]),
    plan_s=st.sampled_from([0.0, 0.1, 2.0]),
    memory_bytes=st.sampled_from([0, 40_000_000]),
    may_leave_out=st.booleans(),
    max_acted_ratio=st.just(1.0),
)


def test_a_plan_keeps_the_rules_and_pays_by_its_own_forecast() -> None:
    drawn: Counter[MitigationLevel] = Counter()

    @settings(deadline=None, max_examples=examples(60))
    @given(views(), configs)
    def keeps_the_rules(view: PlanningSnapshot, config: PolicyConfig) -> None:
        drawn[decide(view, config).level] += 1
        check_decision(view, config)

    keeps_the_rules()
    plans = drawn.total() - drawn[MitigationLevel.NOTHING]
    assert plans >= MIN_PLANS * drawn.total()
    assert sum(drawn[level] for level in STATE_MOVING_LEVELS) > 0


def check_decision(view: PlanningSnapshot, config: PolicyConfig) -> None:
    decision = decide(view, config)
    assert decision.reason
    assert decide(view, config) == decision
    if decision.layout is None:
        assert decision.level is MitigationLevel.NOTHING
        return
    layout = decision.layout
    assert layout.generation == view.next_generation
    assert decode_layout(encode_layout(layout)) == layout
    assert layout.ranks == view.layout.ranks
    assert bool(layout.standing_by) == (decision.level is MitigationLevel.LEAVE_OUT)
    assert config.may_leave_out or not layout.standing_by
    pricing = Pricing(view, config)
    assert pricing.problem is not None
    if layout.mesh != view.layout.mesh:
        assert decision.level in STATE_MOVING_LEVELS
        check_partition(as_partition(view, layout), pricing.problem)
    gain_s = pricing.current_s - pricing.price(layout).step_s
    assert decision.planned_step_s == pytest.approx(pricing.current_s - gain_s)
    priced = [one.planned_step_s for one in decision.considered]
    least_s = min(decision.planned_step_s, pricing.current_s, *priced)
    assert decision.fluid_step_s <= least_s * (1.0 + 1e-9)
    if decision.reason.startswith("experts on fewer than"):
        # For safety: it needs not be faster, only not much slower.
        assert decision.planned_step_s <= (1.0 + config.min_gain) * pricing.current_s
        assert layout.mesh == view.layout.mesh
        return
    assert gain_s >= config.min_gain * pricing.current_s - 1e-9
    assert gain_s * config.horizon_steps > decision.cost_s
    if layout.mesh != view.layout.mesh and view.slow_steps is not None:
        assert gain_s * view.slow_steps >= decision.cost_s
    for before, after in zip(view.layout.experts, layout.experts, strict=True):
        assert len(before) == len(after)


def test_after_recovery_home_returns_and_stays() -> None:
    returned = Counter[bool]()

    @settings(deadline=None, max_examples=examples(30))
    @given(views(), configs)
    def returns_and_stays(view: PlanningSnapshot, config: PolicyConfig) -> None:
        config = replace(config, may_leave_out=False, min_nodes=1, memory_bytes=0)
        decision = decide(view, config)
        is_moved = decision.layout is not None and bool(view.slow)
        returned[is_moved and check_return(view, config, decision)] += 1

    returns_and_stays()
    assert returned[True] >= MIN_PLANS * returned.total()


def test_a_baseline_that_is_as_fast_but_for_rounding_is_restored() -> None:
    """Three stages of 4 layers: both cuts take 3.2 s, one forecast is 3e-16 above the other."""
    layout = staged_layout(stages=3, data=1, tensor=2, layers=4, experts=0)
    view = replace(
        view_of(layout, slow={0: 1.15}, baseline=layout, microbatches=1, rows=8),
        node_of={rank: f"node-{rank // 4}" for rank in layout.ranks},
        step_s=0.0,
        slow_steps=None,
    )
    config = PolicyConfig(
        min_gain=0.0, plan_s=0.0, horizon_steps=1, min_nodes=1, memory_bytes=0, max_acted_ratio=1.0
    )
    decision = decide(view, config)
    assert decision.level is MitigationLevel.MOVE_LAYERS
    assert check_return(view, config, decision)


def check_return(view: PlanningSnapshot, config: PolicyConfig, decision: Decision) -> bool:
    """Whether it returns: always, but where the plan is faster than home without any fault."""
    assert decision.layout is not None
    over = replace(
        view,
        layout=decision.layout,
        work=work_of(decision.layout),
        slow={},
        step_s=0.0,
        slow_steps=None,
        next_generation=view.next_generation + 1,
    )
    back, pricing = decide(over, config), Pricing(over, config)
    home_s = pricing.price(pricing.as_run(view.layout)).step_s
    if home_s > (1.0 + config.min_gain) * pricing.current_s * (1.0 + 1e-9):
        assert back.level is not MitigationLevel.RETURN_HOME
        return False
    assert back.level is MitigationLevel.RETURN_HOME
    assert back.layout == replace(view.layout, generation=over.next_generation)
    there = replace(over, layout=back.layout, baseline=None, work=view.work, steps_since_plan=3)
    assert decide(there, config).layout is None
    return True
