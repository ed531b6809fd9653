"""What a job reports bounds and prices its plans: memory, messages, links, schedule, certainty."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper.controller.planning.partition_cost.memory import memory_bytes
from pacekeeper.controller.policy.decide import decide
from pacekeeper.controller.policy.partition_inputs import as_partition, unreported
from pacekeeper.controller.policy.pricing import Pricing
from pacekeeper.controller.state.planning_snapshot import PlanningSnapshot
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import Decision, MitigationLevel, NoPlanCode
from pacekeeper.core.layout.layout import BlockKind, Layout
from pacekeeper.core.layout.live_rules import check_live_layout
from pacekeeper.core.layout.pipeline_schedule import Schedule
from pacekeeper.core.layout.state_owners import assign_state_owners
from support.partitioned import NUM_SHARDS, staged_layout, view_of, work_of

CONFIG = PolicyConfig(min_nodes=1)
REPORTED: dict[str, Any] = {
    "num_microbatches": 4,
    "tokens_per_row": 100,
    "hidden_bytes": 1000,
    "activation_bytes": 2000,
    "whole_activation_bytes": 1000,
    "head_activation_bytes": 5000,
    "embedding_bytes": 10_000_000,
    "head_bytes": 12_000_000,
    "norm_router_bytes": 1_000_000,
    "attention_bytes": 400_000,
    "mlp_bytes": 600_000,
    "shared_mlp_bytes": 0,
    "gradient_bytes": 16_000_000,
    "optimizer_bytes": 40_000_000,
    "dense_bytes": 64_000_000,
}


def reporting(
    layout: Layout,
    *,
    slow: Mapping[int, float] | None = None,
    memory: int = 0,
    shape: Mapping[str, Any] | None = None,
    **own: Any,
) -> PlanningSnapshot:
    """A job that reports all there is; every rank has so much memory."""
    view = view_of(layout, slow=slow, baseline=layout)
    return replace(
        view,
        shape=replace(view.shape, **REPORTED | dict(shape or {})),
        memory_of=dict.fromkeys(layout.ranks, memory),
        **{"link_s_per_byte": 1e-12, **own},
    )


def planned(decision: Decision) -> Layout:
    assert decision.layout is not None, decision.reason
    return decision.layout


DENSE = staged_layout(experts=0)
MOE = staged_layout()


def test_what_is_not_reported_is_named_in_the_decision() -> None:
    micro_batches: dict[str, Any] = {"num_microbatches": 4, "rows_per_microbatch": 8}
    view = reporting(DENSE, slow={1: 2.0}, memory=10**12, shape=micro_batches)
    assert unreported(view, CONFIG) == ()
    assert "does not report" not in decide(view, CONFIG).reason
    for name, text in zip(
        micro_batches, ("number of micro-batches", "rows of a micro-batch"), strict=True
    ):
        nothing: dict[str, Any] = {name: 0}
        without = replace(view, shape=replace(view.shape, **nothing))
        assert unreported(without, CONFIG) == (text,)
    bare = view_of(DENSE, slow={1: 2.0})
    missing = unreported(bare, CONFIG)
    assert len(missing) == 7
    assert all(name in decide(bare, CONFIG).reason for name in missing)
    assert "memory" not in unreported(bare, replace(CONFIG, memory_bytes=1))


@pytest.mark.parametrize("head_s", [0.0, 0.8, 4.0])
def test_no_plan_is_priced_below_its_bound_however_heavy_the_head(head_s: float) -> None:
    """Even stages with a heavy head are no measure: plans of other stages may be faster."""
    layout = staged_layout(data=1, tensor=1, experts=0)
    work = work_of(layout)
    work[1] = replace(work[1], dense_s=work[1].dense_s + head_s)
    view = replace(view_of(layout, slow={1: 1.6}, baseline=layout), work=work)
    decision = decide(view, CONFIG)
    assert decision.level is MitigationLevel.MOVE_LAYERS
    whole_s = sum(one.dense_s for one in work.values())
    assert decision.fluid_step_s == pytest.approx(whole_s / (1.0 + 1.0 / 1.6))
    assert decision.fluid_step_s < decision.planned_step_s


def test_memory_is_state_and_what_the_schedule_keeps_of_activations() -> None:
    """Stage 0, one of two ranks: 4 layers of 4 + 4 shards, 1 MB each of norms, the embedding."""
    view = reporting(DENSE, memory=10**9)
    problem = Pricing(view, CONFIG).problem
    assert problem is not None
    held = 1.25  # gradients are a quarter of the state
    state = held * (4 * 4 * (400_000 + 600_000) + 4 * 1_000_000)
    rows = 8 * 100  # tokens of a micro-batch
    # Two micro-batches in flight in the first stage, and one in the last, or two with zero bubble.
    kept = 4 * rows * (0.5 * 2000 + 1000)
    last = rows * 5000 + held * 12_000_000
    first = held * 10_000_000

    def used(schedule: Schedule) -> dict[int, float]:
        of = replace(view, shape=replace(view.shape, schedule=schedule))
        found = Pricing(of, CONFIG).problem
        assert found is not None
        return memory_bytes(found.now, found)

    one = used(Schedule.ONE_F_ONE_B)
    assert one[0] == pytest.approx(state + first + 2 * kept)
    assert one[2] == pytest.approx(state + last + kept)
    assert used(Schedule.ZERO_BUBBLE)[2] == pytest.approx(state + last + 2 * kept)


def test_owners_of_optimizer_state_hold_it_and_others_do_not() -> None:
    view = reporting(DENSE, memory=10**9)
    owned = replace(view, layout=assign_state_owners(DENSE))
    problems = [Pricing(one, CONFIG).problem for one in (view, owned)]
    layers = [problem.model.layers[1] for problem in problems if problem is not None]
    # 40 of 64 MB are optimizer state, 16 MB gradients.
    assert layers[1].attention_bytes / layers[0].attention_bytes == pytest.approx(0.625 / 1.25)
    room = [problem.devices[0].memory_bytes for problem in problems if problem is not None]
    assert room == [10**9, 10**9 - 2 * 40_000_000 / 8]


def test_a_plan_keeps_owners_of_optimizer_state_even_in_bytes() -> None:
    view = reporting(DENSE, slow={1: 3.0}, memory=10**9)
    new = planned(decide(replace(view, layout=assign_state_owners(DENSE)), CONFIG))
    assert new.mesh != DENSE.mesh
    owners = new.state_owner_by_block
    assert list(owners) == list(new.owned_blocks())
    sizes = {
        block: {
            BlockKind.EMBEDDING: REPORTED["embedding_bytes"],
            BlockKind.HEAD: REPORTED["head_bytes"],
            BlockKind.ATTENTION: REPORTED["attention_bytes"],
            BlockKind.DENSE_MLP: REPORTED["mlp_bytes"],
        }[block.kind]
        for block in owners
    }
    load: dict[int, int] = dict.fromkeys(new.working, 0)
    for block, owner in owners.items():
        load[owner.owner] += sizes[block]
    for block, owner in owners.items():
        assert load[owner.owner] <= min(load[r] for r in new.holders(block)) + sizes[block]


def test_no_plan_exceeds_the_memory_that_ranks_report() -> None:
    wide = decide(reporting(DENSE, slow={1: 3.0}, memory=10**9), CONFIG)
    assert planned(wide).mesh != DENSE.mesh
    tight = decide(reporting(DENSE, slow={1: 3.0}, memory=46_000_000), CONFIG)
    assert tight.layout is None or planned(tight).mesh == DENSE.mesh
    assert any("bytes" in one.why_not for one in tight.considered)


def test_a_cordoned_rank_keeps_its_work_where_the_others_lack_memory() -> None:
    def with_room(memory: int) -> Decision:
        return decide(replace(reporting(DENSE, memory=memory), cordoned=frozenset({1})), CONFIG)

    assert planned(with_room(10**12)).standing_by
    kept = with_room(46_000_000)
    assert kept.layout is None or not kept.layout.standing_by
    assert "bytes" in kept.reason


def test_pipelines_of_a_dense_job_get_cuts_and_runs_of_their_own() -> None:
    view = reporting(DENSE, slow={0: 3.0, 1: 3.0}, memory=10**12)
    decision = decide(view, CONFIG)
    layout = planned(decision)
    assert decision.level in (MitigationLevel.MOVE_LAYERS, MitigationLevel.LEAVE_OUT)
    assert not layout.has_equal_cuts
    check_live_layout(layout)
    assert decision.planned_step_s == pytest.approx(Pricing(view, CONFIG).price(layout).step_s)
    # A job of unequal pipelines is planned further.
    again = replace(view, layout=layout, work=work_of(layout), next_generation=10)
    assert decide(again, CONFIG).no_plan is not NoPlanCode.NOT_PRICEABLE


def test_attention_and_mlp_have_runs_of_their_own_where_shards_differ() -> None:
    layout = replace(
        DENSE,
        num_mlp_shards=2 * NUM_SHARDS,
        pipelines=tuple(
            replace(
                pipeline,
                stages=tuple(
                    replace(
                        stage,
                        mlp=tuple(
                            replace(run, first=2 * run.first, end=2 * run.end) for run in stage.mlp
                        ),
                    )
                    for stage in pipeline.stages
                ),
            )
            for pipeline in DENSE.pipelines
        ),
    )
    view = reporting(layout, slow={1: 1.5}, memory=10**12, shape={"mlp_bytes": 300_000})
    decision = decide(view, replace(CONFIG, may_leave_out=False))
    stages = [stage for stages in planned(decision).mesh for stage in stages if 1 in stage.group]
    (stage,) = stages
    heads = {run.rank: run.end - run.first for run in stage.attention}
    columns = {run.rank: run.end - run.first for run in stage.mlp}
    assert (heads[1], columns[1]) == (3, 6) or 2 * heads[1] != columns[1]


def test_shared_experts_stay_a_part_of_the_model() -> None:
    layout = replace(MOE, shared_mlp_layers=tuple(range(8)))
    view = reporting(layout, slow={1: 2.0}, memory=10**12, shape={"shared_mlp_bytes": 100_000})
    assert planned(decide(view, CONFIG)).model == layout.model


def test_messages_are_priced_at_the_speed_of_links() -> None:
    fast = reporting(DENSE, memory=10**12)
    slow = replace(fast, link_s_per_byte=1e-7)
    prices = [Pricing(view, CONFIG).price(DENSE).step_s for view in (fast, slow)]
    assert prices[1] > 1.05 * prices[0]
    problem = Pricing(slow, CONFIG).problem
    assert problem is not None
    assert problem.links.between_bytes_per_s == pytest.approx(5e6)
    assert problem.model.boundary_bytes == 100 * 1000


def behind_slow_links(*ranks: int) -> Decision:
    """Of two pipelines of two stages; each rank is a node. Nobody is left out."""
    layout = staged_layout(experts=0, tensor=1)
    healthy = replace(
        reporting(layout, memory=10**12, link_s_per_byte=4e-6),
        node_of={rank: f"node-{rank}" for rank in layout.ranks},
    )
    assert decide(healthy, CONFIG).layout is None
    view = replace(healthy, slow_links=dict.fromkeys(ranks, 8.0))
    decision = decide(view, replace(CONFIG, may_leave_out=False))
    assert decision.planned_step_s < decision.current_step_s
    return decision


def test_a_slow_link_changes_the_rows_of_pipelines() -> None:
    decision = behind_slow_links(0)
    plan = planned(decision)
    assert decision.level is MitigationLevel.BATCH_SHARES
    assert plan.mesh == staged_layout(experts=0, tensor=1).mesh
    rows = plan.rows_of(64)
    assert rows[0] < rows[2]  # of the pipeline of rank 0, and of the other one
    assert "links of ranks 0 are slow" in decision.reason


def test_slow_links_in_two_pipelines_are_brought_together_in_one() -> None:
    before = staged_layout(experts=0, tensor=1)
    plan = planned(behind_slow_links(0, 3))

    def pipelines(of: Layout) -> set[tuple[int, ...]]:
        return {tuple(r for stage in one.stages for r in stage.group) for one in of.pipelines}

    assert pipelines(before) == {(0, 1), (2, 3)}
    assert pipelines(plan) == {(0, 3), (2, 1)}
    rows = plan.rows_of(64)
    assert rows[0] < rows[2]


def test_a_slow_link_gets_fewer_rows_of_experts() -> None:
    """Each rank runs all layers: tokens shift away from the replica behind the link."""
    layout = staged_layout(stages=1, tensor=1, data=4)
    view = reporting(layout, memory=10**12, link_s_per_byte=1e-6, slow_links={2: 5.0})
    view = replace(view, work={})
    assert not view.is_partitioned
    decision = decide(view, CONFIG)
    before, after = (
        sum(
            replica.share
            for experts in of.experts
            for replicas in experts
            for replica in replicas
            if replica.rank == 2
        )
        for of in (layout, planned(decision))
    )
    assert after < before
    assert dict(planned(decision).speeds)[2] < 1.0
    unmeasured = replace(view, link_s_per_byte=0.0)
    assert decide(unmeasured, CONFIG).layout is None


@pytest.mark.parametrize(
    ("at_least", "is_left_out"), [({}, False), ({1: 1.05}, False), ({1: 40.0}, True)]
)
def test_a_rank_is_left_out_where_that_surely_pays(
    at_least: Mapping[int, float], is_left_out: bool
) -> None:
    view = replace(view_of(MOE, slow={1: 60.0}, baseline=MOE), slow_at_least=at_least)
    decision = decide(view, CONFIG)
    assert (decision.level is MitigationLevel.LEAVE_OUT) == is_left_out
    (considered,) = [one for one in decision.considered if one.level is MitigationLevel.LEAVE_OUT]
    assert bool(considered.why_not) != is_left_out


def test_a_layout_whose_pipelines_share_experts_has_one_cut() -> None:
    one, two = DENSE.pipelines
    first, last = two.stages
    other = replace(two, stages=(replace(first, end_layer=3), replace(last, first_layer=3)))
    uneven = replace(DENSE, pipelines=(one, other))
    check_live_layout(uneven)
    assert [p.cuts for p in as_partition(view_of(DENSE), uneven).pipelines] == [(4, 8), (3, 8)]
    hosts = MOE.experts[0]
    with_experts = replace(uneven, experts=(hosts, *uneven.experts[1:]))
    with pytest.raises(ValueError, match=r"\(3, 8\) and \(4, 8\)"):
        check_live_layout(with_experts)
