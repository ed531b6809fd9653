"""Shares of the rows by stage in the policy: planned, priced, given up, and kept from cordoned."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.controller.policy.cordons import ranks_given_work
from pacekeeper.controller.policy.decide import decide
from pacekeeper.controller.policy.pricing import Pricing
from pacekeeper.controller.state.planning_snapshot import PlanningSnapshot
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import MitigationLevel
from pacekeeper.core.layout.layout import Layout
from pacekeeper.predictor.cost.features import FEATURES
from pacekeeper.predictor.cost.model import CostModel
from support.partitioned import staged_layout, view_of, work_of

CONFIG = PolicyConfig(min_nodes=1, horizon_steps=100, plan_s=0.1, max_moved_bytes=1)
EVEN = staged_layout(tensor=1)  # pipelines of ranks 0 and 1, and of 2 and 3


def dealing(view: PlanningSnapshot, rows_per_microbatch: int = 8) -> PlanningSnapshot:
    """The job of a trainer that deals rows by stage."""
    return replace(view, shape=replace(view.shape, rows_per_microbatch=rows_per_microbatch))


def shared(layout: Layout, shares: Sequence[tuple[float, ...]]) -> Layout:
    both = zip(layout.pipelines, shares, strict=True)
    return replace(layout, pipelines=tuple(replace(one, stage_shares=of) for one, of in both))


TWO_SLOW = dealing(view_of(EVEN, slow={0: 2.0, 3: 2.0}, baseline=EVEN))
"""One in each pipeline and in each stage: no pipeline and no stage is faster than another."""


def test_slow_ranks_hand_rows_over_at_their_stages_where_nothing_moves() -> None:
    decision = decide(TWO_SLOW, CONFIG)
    assert decision.level is MitigationLevel.BATCH_SHARES
    assert decision.layout is not None and decision.layout.mesh == EVEN.mesh
    first, second = decision.layout.pipelines
    assert first.stage_shares[0] < 0.5 < first.stage_shares[1]
    assert second.stage_shares[1] < 0.5 < second.stage_shares[0]
    assert "; other rows at each stage" in decision.reason
    assert decision.moved_bytes == 0
    assert decision.fluid_step_s < decision.planned_step_s < 0.95 * decision.current_step_s


def test_a_trainer_that_does_not_report_it_is_offered_none() -> None:
    decision = decide(dealing(TWO_SLOW, 0), CONFIG)
    assert decision.layout is None or not decision.layout.stage_shares


def test_a_job_is_priced_by_the_shares_that_it_has() -> None:
    layout = decide(TWO_SLOW, CONFIG).layout
    assert layout is not None
    running = dealing(view_of(layout, slow={0: 2.0, 3: 2.0}, work=work_of(EVEN)))
    before, after = Pricing(TWO_SLOW, CONFIG), Pricing(running, CONFIG)
    assert after.current_s == pytest.approx(before.price(layout).step_s)
    assert after.current_s < before.current_s
    # A trainer that cannot deal them has no such layout; nothing is planned for it.
    assert decide(dealing(running, 0), CONFIG).layout is None


def test_after_recovery_rows_stay_in_their_pipelines_again() -> None:
    layout = decide(TWO_SLOW, CONFIG).layout
    assert layout is not None
    healthy = dealing(view_of(layout, baseline=EVEN, work=work_of(layout)))
    decision = decide(replace(healthy, next_generation=10), CONFIG)
    assert decision.level is MitigationLevel.RETURN_HOME
    assert decision.layout == replace(EVEN, generation=10)


def test_more_rows_at_its_stage_are_more_work_for_a_cordoned_rank() -> None:
    view = replace(TWO_SLOW, cordoned=frozenset({1}))
    assert ranks_given_work(view, shared(EVEN, ((0.4, 0.7), (0.6, 0.3)))) == (1,)
    assert ranks_given_work(view, shared(EVEN, ((0.7, 0.4), (0.3, 0.6)))) == ()


def test_a_slow_link_changes_which_rows_are_handed_over() -> None:
    """Rank 2 takes rows of rank 0, and sends their hidden states, unless its link is slow."""
    shape = replace(TWO_SLOW.shape, hidden_bytes=1000, tokens_per_row=100)
    measured = replace(TWO_SLOW, shape=shape, link_s_per_byte=1e-8)
    usual = decide(measured, CONFIG).layout
    assert usual is not None and usual.pipelines[1].share_at(0) > 0.5
    slow = decide(replace(measured, slow_links={2: 1000.0}), CONFIG).layout
    assert slow is not None and slow.pipelines[1].share_at(0) < 0.5


def test_uneven_rows_are_priced_in_the_micro_batches_that_the_trainer_runs() -> None:
    """Ranks without stages: of 64 rows one computes 40, so all run five micro-batches of eight."""
    flat = staged_layout(stages=1, tensor=1)
    uneven = replace(
        flat,
        pipelines=tuple(
            replace(one, batch_share=share)
            for one, share in zip(flat.pipelines, (0.625, 0.375), strict=True)
        ),
    )
    costs = np.array([0.01 * (name == "one") for name in FEATURES])
    nothing = np.zeros((len(FEATURES), len(FEATURES)))
    model = CostModel(coefficients=costs, covariance=nothing, sigma=0.01)
    view = replace(view_of(flat), model=model)
    apart, dealt = Pricing(view, CONFIG), Pricing(dealing(view), CONFIG)
    assert dealt.price(flat).step_s == pytest.approx(apart.price(flat).step_s)
    longer_s = dealt.price(uneven).step_s - apart.price(uneven).step_s
    assert longer_s == pytest.approx(0.01)  # of one micro-batch more
