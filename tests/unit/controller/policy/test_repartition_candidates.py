"""The policy of a job with stages and tensor groups: which level, with which layout, and why."""

from collections import Counter
from dataclasses import replace

import pytest

from pacekeeper.controller.policy.decide import decide
from pacekeeper.controller.policy.partition_inputs import as_partition
from pacekeeper.controller.policy.pricing import Pricing
from pacekeeper.controller.state.job_parts import MeasuredMove
from pacekeeper.controller.state.plan_phase import Forecast, Judged, RankRejection, Verdict
from pacekeeper.controller.state.planning_snapshot import PlanHistory, PlanningSnapshot
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import (
    STATE_MOVING_LEVELS,
    Decision,
    MitigationLevel,
    NoPlanCode,
)
from pacekeeper.core.layout.diff import diff_layouts
from pacekeeper.core.layout.layout import BlockKind, Layout
from pacekeeper.core.layout.pipeline_schedule import Schedule
from support.layouts import on_nodes, with_shares
from support.partitioned import staged_layout, view_of, work_of

CONFIG = PolicyConfig(min_nodes=1)
EVEN = staged_layout()
SLOW = view_of(EVEN, slow={1: 2.0}, baseline=EVEN)
PAIRS = staged_layout(tensor=1)  # no tensor groups: a slow rank can only give layers or rows away


def under(view: PlanningSnapshot, schedule: Schedule | None) -> PlanningSnapshot:
    """The same job, its trainer running this schedule."""
    return replace(view, shape=replace(view.shape, schedule=schedule))


def planned(decision: Decision) -> Layout:
    assert decision.layout is not None, decision.reason
    return decision.layout


def sizes(layout: Layout) -> dict[int, int]:
    """Virtual shards of each rank."""
    return {
        run.rank: run.end - run.first
        for stages in layout.mesh
        for stage in stages
        for run in stage.attention
    }


def cuts(layout: Layout) -> list[int]:
    return [span.stop for span in layout.spans]


def without(config: PolicyConfig, *levels: MitigationLevel) -> Decision:
    """What is decided of the slow job while plans of these kinds wait."""
    refusals = {
        level: RankRejection(plan=PAIRS, rank=0, reason="no", count=1, until_s=60.0)
        for level in levels
    }
    return decide(replace(SLOW, history=PlanHistory(refusals=refusals)), config)


def test_a_slow_rank_keeps_fewer_shards_and_the_reason_says_which() -> None:
    decision = without(CONFIG, MitigationLevel.MOVE_LAYERS)
    layout = planned(decision)
    assert decision.level is MitigationLevel.TENSOR_SHARDS
    assert layout.generation == 9
    assert cuts(layout) == cuts(EVEN) and layout.ranks == EVEN.ranks
    assert sizes(layout) == {**dict.fromkeys(EVEN.ranks, 4), 0: 6, 1: 2}
    assert dict(layout.speeds) == {1: 0.5}
    assert decision.reason.startswith("rank 1 takes 2.00 times")
    assert "; shards 4+4 -> 6+2 on ranks 0, 1" in decision.reason
    assert decision.fluid_step_s < decision.planned_step_s < 0.95 * decision.current_step_s


def test_the_bytes_and_seconds_of_a_move_are_those_of_its_transfers() -> None:
    decision = without(CONFIG, MitigationLevel.MOVE_LAYERS)
    copied = diff_layouts(EVEN, planned(decision))
    shards = [move for move in copied if move.block.kind is BlockKind.ATTENTION]
    # Two of each of the first stage's 4 layers, each as large as an expert here.
    assert [move.destination for move in shards] == [0] * 8
    assert decision.moved_bytes == 1_000_000 * len(copied)
    received = Counter(move.destination for move in copied)
    sent = Counter(move.source for move in copied)
    busiest = max(*received.values(), *sent.values())
    assert decision.cost_s == pytest.approx(
        CONFIG.plan_s + CONFIG.move_s_per_byte * 1_000_000 * busiest
    )


def test_without_tensor_groups_layers_leave_the_stage_of_a_slow_rank() -> None:
    one_pipeline = staged_layout(data=1, tensor=1, layers=8, experts=0)
    view = view_of(one_pipeline, slow={0: 2.0}, baseline=one_pipeline)
    decision = decide(view, CONFIG)
    layout = planned(decision)
    assert decision.level is MitigationLevel.MOVE_LAYERS
    assert cuts(layout) == [2, 8]
    assert "; layers of the stages 4+4 -> 2+6" in decision.reason


def test_a_rank_that_all_but_stands_still_is_moved_around_where_moves_cost_nothing() -> None:
    one_pipeline = staged_layout(data=1, tensor=1, layers=8, experts=0)
    view = view_of(one_pipeline, slow={0: 1e7}, baseline=one_pipeline)
    decision = decide(view, replace(CONFIG, move_s_per_byte=0.0, may_leave_out=False))
    assert decision.level is MitigationLevel.MOVE_LAYERS
    assert cuts(planned(decision)) == [1, 8]


def test_experts_go_with_their_layers_and_keep_their_hosts_number() -> None:
    view = view_of(PAIRS, slow={0: 3.0, 2: 3.0}, baseline=PAIRS)
    decision = decide(view, CONFIG)
    layout = planned(decision)
    assert decision.level is MitigationLevel.MOVE_LAYERS
    first, _ = cuts(layout)
    assert first < 4
    for layer in range(first, 4):
        for hosts in layout.experts[layer]:
            assert {host.rank for host in hosts} == {1, 3}


def test_experts_go_to_two_racks_with_their_layers() -> None:
    layout = staged_layout(tensor=1, data=4)
    view = view_of(layout, slow={0: 3.0, 2: 3.0, 4: 3.0}, baseline=layout)
    rack_of = {rank: rank // 4 for rank in layout.ranks}
    view = replace(view, shape=replace(view.shape, slots_per_rank=2), rack_of=rack_of)
    assert min(map(min, on_nodes(layout, rack_of))) == 1
    after = planned(decide(view, CONFIG))
    assert cuts(after) != cuts(layout)
    assert on_nodes(after, rack_of) == [[2] * 4] * 8


def test_a_slow_pipeline_gets_fewer_rows_where_nothing_else_may_move() -> None:
    decision = without(CONFIG, *STATE_MOVING_LEVELS)
    layout = planned(decision)
    assert decision.level is MitigationLevel.BATCH_SHARES
    rows = layout.rows_of(64)
    assert rows[0] < 32 < rows[4] and sum(rows.values()) == 64
    assert layout.mesh == EVEN.mesh


def test_all_rungs_are_priced_alike_and_the_dear_ones_bring_more() -> None:
    shares = without(CONFIG, *STATE_MOVING_LEVELS)
    shards = without(CONFIG, MitigationLevel.MOVE_LAYERS)
    best = decide(SLOW, CONFIG)
    assert shares.current_step_s == shards.current_step_s == best.current_step_s
    assert best.planned_step_s <= shards.planned_step_s < shares.planned_step_s
    assert best.planned_step_s == pytest.approx(Pricing(SLOW, CONFIG).price(planned(best)).step_s)


def test_what_is_costly_is_probed_first_and_a_refuted_rank_only_gets_other_shares() -> None:
    assert decide(replace(SLOW, unprobed=frozenset({1})), CONFIG).unconfirmed == (1,)
    assert (
        decide(replace(SLOW, refuted=frozenset({1})), CONFIG).level is MitigationLevel.BATCH_SHARES
    )
    assert decide(replace(SLOW, is_probing=True), CONFIG).level is MitigationLevel.BATCH_SHARES


@pytest.mark.parametrize("refuted", [3, 5])
def test_state_moves_for_other_slow_ranks_while_one_is_refuted(refuted: int) -> None:
    both = replace(SLOW, slow={1: 2.0, refuted: 1.3}, refuted=frozenset({refuted}))
    decision, alone = decide(both, CONFIG), decide(SLOW, CONFIG)
    assert decision.level is alone.level and decision.level in STATE_MOVING_LEVELS
    layout = planned(decision)
    assert sizes(layout) == sizes(planned(alone)) and cuts(layout) == cuts(planned(alone))
    assert dict(layout.speeds) == {1: 0.5, refuted: 1 / 1.3}
    priced = Pricing(both, CONFIG)  # as slow as it is
    assert decision.planned_step_s == pytest.approx(priced.price(layout).step_s)
    assert decision.planned_step_s < 0.95 * decision.current_step_s


def test_a_re_partition_waits_until_the_fault_has_cost_as_much() -> None:
    dear = replace(CONFIG, plan_s=5.0, horizon_steps=1000)
    short = without(replace(dear, plan_s=0.0), MitigationLevel.MOVE_LAYERS)
    gain_s = short.current_step_s - short.planned_step_s
    enough = int(5.0 / gain_s) + 2
    assert planned(decide(replace(SLOW, slow_steps=1), dear)).mesh == EVEN.mesh
    assert planned(decide(replace(SLOW, slow_steps=enough), dear)).mesh != EVEN.mesh
    assert planned(decide(replace(SLOW, slow_steps=None), dear)).mesh != EVEN.mesh
    only_layers = view_of(
        lone := staged_layout(data=1, tensor=1, experts=0), slow={0: 2.0}, baseline=lone
    )
    decision = decide(replace(only_layers, slow_steps=1), dear)
    assert decision.level is MitigationLevel.NOTHING
    assert "so far: it may pass" in decision.reason


def test_a_move_that_does_not_pay_over_the_horizon_is_not_made() -> None:
    assert decide(SLOW, replace(CONFIG, horizon_steps=2, plan_s=30.0)).layout is None


def test_measured_moves_say_what_the_next_one_costs() -> None:
    moves = {
        3: MeasuredMove(duration_s=0.5),
        4: MeasuredMove(duration_s=2.5, total_bytes=400, busiest_bytes=100),
    }
    decision = decide(replace(SLOW, history=PlanHistory(moves=moves)), CONFIG)
    assert decision.level is MitigationLevel.BATCH_SHARES  # a byte takes 20 ms
    assert decision.cost_s == 0.5


def test_the_budget_of_bytes_holds_for_shards_and_layers() -> None:
    assert decide(SLOW, replace(CONFIG, max_moved_bytes=1000)).level is MitigationLevel.BATCH_SHARES


def test_memory_that_is_told_bounds_what_a_rank_takes_over() -> None:
    # 6 of 8 shards of 4 layers are 24 MB, 4 slots of 1 MB in each layer 16 MB more.
    free = without(CONFIG, MitigationLevel.MOVE_LAYERS)
    assert sizes(planned(free))[0] == 6
    tight = replace(CONFIG, memory_bytes=39_000_000)
    assert planned(without(tight, MitigationLevel.MOVE_LAYERS)).mesh == EVEN.mesh


def test_a_rank_is_left_out_only_where_that_is_allowed() -> None:
    hopeless = view_of(EVEN, slow={1: 60.0}, baseline=EVEN)
    kept = decide(hopeless, replace(CONFIG, may_leave_out=False))
    assert planned(kept).ranks == EVEN.ranks and not planned(kept).standing_by
    freed = decide(hopeless, CONFIG)
    assert freed.level is MitigationLevel.LEAVE_OUT
    assert planned(freed).standing_by == (1,)
    assert planned(freed).ranks == EVEN.ranks
    assert "; ranks 1 become standby" in freed.reason
    assert freed.planned_step_s < kept.planned_step_s


THREE = staged_layout(tensor=1, data=3)  # stages of ranks 0, 2, 4 and of 1, 3, 5


@pytest.mark.parametrize(
    ("doubted", "standing_by"),
    [
        pytest.param((), (0, 5), id="nobody"),
        pytest.param((3,), (0, 3), id="one"),
        pytest.param((1, 2), (0, 1), id="who else would cost as little"),
        pytest.param((3, 5), (0, 5), id="only as many as are too many"),
        pytest.param((2,), (0, 5), id="not whom its stage needs"),
        pytest.param((0,), (0, 5), id="the slow one anyhow"),
    ],
)
def test_where_a_healthy_rank_is_over_one_with_a_bad_past_stands_by(
    doubted: tuple[int, ...], standing_by: tuple[int, ...]
) -> None:
    """Without rank 0 its stage has two pipelines left: one rank of the other is over."""
    config = replace(CONFIG, may_leave_out=True)
    view = view_of(THREE, slow={0: 60.0}, baseline=THREE)
    usual = decide(view, config)
    decision = decide(replace(view, doubted=frozenset(doubted)), config)
    assert planned(decision).standing_by == standing_by
    assert decision.planned_step_s == pytest.approx(usual.planned_step_s, rel=1e-9)
    over = set(standing_by) & set(doubted) - {0}
    words = f"{max(over, default=0)} first: on nodes that were slow repeatedly"
    assert (words in decision.reason) == bool(over)


def test_a_bad_past_is_no_reason_where_it_costs_anything() -> None:
    """Rank 3 is slower than rank 5, if only a little."""
    config = replace(CONFIG, may_leave_out=True)
    view = view_of(THREE, slow={0: 60.0, 3: 1.1}, baseline=THREE)
    decision = decide(replace(view, doubted=frozenset({5})), config)
    assert planned(decision).standing_by == (0, 3), "who is slow now goes first"
    assert "slow repeatedly" not in decision.reason


@pytest.mark.parametrize(
    ("schedule", "thirds"),
    # Of a micro-batch on a stage: 4 + 2 - 1 whole ones, or f + b - w beside 4 whole ones.
    [(Schedule.ONE_F_ONE_B, 15), (Schedule.ZERO_BUBBLE, 13)],
)
def test_a_job_is_priced_by_the_program_of_its_schedule(schedule: Schedule, thirds: int) -> None:
    view = under(view_of(EVEN), schedule)
    pricing = Pricing(view, CONFIG)
    assert pricing.problem is not None and pricing.problem.now.schedule is schedule
    # 8 layers of 1.6 s and experts of 0.8 s, on 8 ranks, in 4 micro-batches.
    assert pricing.current_s == pytest.approx(thirds * (8 * 2.4 / 8 / 4) / 3)


@pytest.mark.parametrize("schedule", [None, Schedule.INTERLEAVED])
def test_a_job_whose_program_is_not_known_is_not_planned(schedule: Schedule | None) -> None:
    assert decide(SLOW, CONFIG).layout is not None
    decision = decide(under(SLOW, schedule), CONFIG)
    assert (decision.level, decision.layout) == (MitigationLevel.NOTHING, None)
    assert decision.no_plan is NoPlanCode.NOT_PRICEABLE


def test_the_schedule_of_a_job_without_stages_is_of_no_account() -> None:
    flat = staged_layout(stages=1, tensor=1)
    view = view_of(flat, slow={1: 2.0}, baseline=flat)
    assert decide(under(view, None), CONFIG) == decide(view, CONFIG)


def test_nothing_is_planned_before_the_work_of_the_stages_is_measured() -> None:
    decision = decide(replace(SLOW, work={}), CONFIG)
    assert decision.layout is None
    assert decision.no_plan is NoPlanCode.NOT_PRICEABLE


def test_pipelines_with_fewer_rows_than_micro_batches_are_not_planned() -> None:
    few = view_of(EVEN, slow={1: 2.0}, rows=6)
    assert "3 rows can not be divided into 4 micro-batches" in decide(few, CONFIG).reason


def test_after_recovery_the_shards_and_layers_of_before_come_back() -> None:
    away = planned(decide(SLOW, CONFIG))
    assert away.mesh != EVEN.mesh
    over = replace(view_of(away, baseline=EVEN, work=work_of(away)), next_generation=10)
    decision = decide(over, CONFIG)
    assert decision.level is MitigationLevel.RETURN_HOME
    assert decision.layout == replace(EVEN, generation=10)
    assert decision.moved_bytes > 0
    assert decide(replace(over, layout=EVEN), CONFIG).layout is None
    runs = planned(without(CONFIG, MitigationLevel.MOVE_LAYERS)).pipelines
    shares = [pipeline.batch_share for pipeline in EVEN.pipelines]
    other = with_shares(replace(EVEN, pipelines=runs), *shares)  # in nothing else than its runs
    alike = view_of(other, baseline=EVEN, work=work_of(other))
    assert decide(alike, CONFIG).level is MitigationLevel.RETURN_HOME


def test_a_head_is_what_the_last_stage_takes_beyond_its_layers() -> None:
    work = dict(SLOW.work)
    for rank in EVEN.ranks_of_layer(4):
        work[rank] = replace(work[rank], dense_s=1.5 * work[rank].dense_s)
    problem = Pricing(replace(SLOW, work=work), CONFIG).problem
    assert problem is not None
    assert [layer.attention_s for layer in problem.model.layers] == [
        pytest.approx(1.6 / (3 * 64))
    ] * 8
    assert problem.model.head_s == pytest.approx(2 * 1.6 / (3 * 64))


def test_the_price_of_a_healthy_job_is_the_longest_path_of_its_work() -> None:
    healthy = view_of(EVEN)
    # A stage: 4 layers of 2.4 s over 4 ranks, cut into 4 micro-batches; one more for the bubble.
    assert Pricing(healthy, CONFIG).current_s == pytest.approx(4 * 2.4 / 4 * (4 + 1) / 4)
    measured = Pricing(replace(healthy, step_s=4.0), CONFIG)
    assert measured.current_s == 4.0
    assert measured.price(EVEN).step_s == 4.0


def test_a_plan_that_brought_nothing_is_undone_and_its_kind_waits() -> None:
    away = planned(without(CONFIG, MitigationLevel.MOVE_LAYERS))
    forecast = Forecast(
        plan=away,
        level=MitigationLevel.TENSOR_SHARDS,
        base=EVEN,
        before_s=4.0,
        planned_s=3.0,
        slow={1: 2.0},
    )
    view = replace(
        view_of(away, slow={1: 2.0}, baseline=EVEN, work=work_of(away)),
        step_s=5.0,
        history=PlanHistory(
            failed=Judged(forecast=forecast, verdict=Verdict.NOTHING, measured_s=5.0)
        ),
        next_generation=10,
    )
    decision = decide(view, CONFIG)
    assert decision.level is MitigationLevel.ROLL_BACK
    assert decision.layout == replace(EVEN, generation=10)
    assert all(took in decision.reason for took in ("from 4 s to 3 s", "is 5 s"))
    dear = decide(view, replace(CONFIG, plan_s=1e4))
    assert dear.level is not MitigationLevel.ROLL_BACK
    other = replace(view, slow={1: 2.0, 2: 2.0})
    assert decide(other, CONFIG).level is not MitigationLevel.ROLL_BACK


def test_a_layout_is_the_partition_it_says() -> None:
    partition = as_partition(SLOW, EVEN)
    assert [pipeline.rows for pipeline in partition.pipelines] == [32, 32]
    assert {pipeline.micro_batches for pipeline in partition.pipelines} == {(8, 8, 8, 8)}
    assert partition.pipelines[1].cells[1].attention == EVEN.pipelines[1].stages[1].attention
