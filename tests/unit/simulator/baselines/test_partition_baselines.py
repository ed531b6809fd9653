"""The published planners of partitions do what their papers say, by hand."""

from dataclasses import replace

import pytest
from benchmarks.malleus import malleus, parts_of

from pacekeeper.controller.planning.model.partition import Partition
from pacekeeper.controller.planning.model.problem import Links
from pacekeeper.controller.planning.partition.constraints import check_partition
from pacekeeper.controller.planning.partition.incremental import with_other_shards
from pacekeeper.controller.planning.partition_cost.step_time import price
from pacekeeper.simulator.baselines.greyhound import greyhound, least_variance, s3
from pacekeeper.simulator.baselines.resihp import DELTAS, exclude, resihp
from pacekeeper.simulator.baselines.resihp_migration import (
    Migration,
    StageOrder,
    StageWork,
    migrate_each,
)
from pacekeeper.simulator.baselines.step_simulation import NEVER, walked, walks_of_cells
from support.partitions import FAST, even_partition, model_of, problem_of

MODEL = model_of(16, attention=32, mlp=64)
HOME = even_partition(MODEL, data=2, stages=2, tensor=4, rows=32, micro_batches=8)
GROUP = (4, 5, 6, 7)


def migrated(work: StageWork, *, delta: int) -> tuple[float, tuple[Migration, ...]]:
    (found,) = migrate_each(work, deltas=(delta,))
    return found[:2]


def work(paces: list[list[float | None]], number: int = 4, *, is_split: bool = False) -> StageWork:
    """Forward takes a pace, backward twice that; half of it may wait where it is split."""
    num_stages = len(paces[0])
    return StageWork(
        forward_s=tuple(tuple(of) for of in paces),
        backward_s=tuple(tuple(p and 2 * p for p in of) for of in paces),
        weight_s=tuple(tuple(p or 0.0 if is_split else 0.0 for p in of) for of in paces),
        message_s=((0.0,) * (num_stages - 1),) * len(paces),
        num_microbatches=(number,) * len(paces),
        in_flight=tuple(range(num_stages, 0, -1)),
    )


def test_devices_stay_while_their_number_times_the_slowest_grows() -> None:
    def kept(*speeds: float) -> tuple[int, ...]:
        slow = dict(zip(GROUP, speeds, strict=True))
        return exclude(GROUP, problem_of(MODEL, HOME, slow=slow), 0, 8)

    assert kept(1.0, 1.0, 1.0, 0.6) == GROUP  # 4 x 0.6 > 2 x 1
    assert kept(1.0, 0.4, 1.0, 1.0) == (4, 6)  # 2 x 1 > 4 x 0.4; the third is left over
    assert kept(0.0, 0.3, 0.0, 0.0) == (5,)
    assert kept(0.0, 0.0, 0.0, 0.0) == ()


def test_who_is_left_over_completes_another_group_of_its_node() -> None:
    # Ranks 0-3 and 4-7 are one stage's groups in one node; each loses a rank.
    plan = resihp(problem_of(MODEL, HOME, slow={1: 0.0, 6: 0.0}))
    sizes = sorted(len(of_pipeline[0]) for of_pipeline in plan.groups)
    assert sizes == [2, 4] and plan.standby == ()
    assert len(resihp(problem_of(MODEL, HOME, slow={1: 0.0})).standby) == 1
    # In other nodes there is nobody to complete.
    apart = problem_of(MODEL, HOME, slow={1: 0.0, 6: 0.0}, ranks_per_node=4)
    assert len(resihp(apart).standby) == 2


def test_memory_sets_the_fewest_devices() -> None:
    slow = {4: 0.4}
    # 8 layers of 2 GB on two ranks are 8 GB; activations of 4 rows in 8 layers come on top.
    tight = problem_of(MODEL, HOME, slow=slow, memory_bytes=7e9)
    assert exclude(GROUP, tight, 0, 8) == GROUP


def test_equal_stages_hand_nothing_over_and_take_as_long_as_1f1b() -> None:
    assert migrated(work([[1.0, 1.0], [1.0, 1.0]]), delta=0) == (15.0, ())


def test_weight_gradients_that_may_wait_let_gradients_pass_and_fill_the_bubbles() -> None:
    # One micro-batch: there and back in 4, and the first stage's weight gradient.
    assert migrated(work([[1.0, 1.0]], 1, is_split=True), delta=0)[0] == 5.0
    assert migrated(work([[1.0, 1.0]], 1), delta=0)[0] == 6.0
    # Many: the stage that has twice as much to do works without a pause from its first input on.
    step_s, _ = migrated(work([[1.0, 2.0]], 8, is_split=True), delta=0)
    assert step_s == 1.0 + 8 * 6.0
    assert migrated(work([[1.0, 2.0]], 8), delta=0)[0] > step_s


def test_a_dead_stage_is_run_by_the_other_pipeline() -> None:
    step_s, moved = migrated(work([[1.0, None], [1.0, 1.0]]), delta=1)
    assert {m for m in moved if m.pipeline == 0 and m.stage == 1} == {
        Migration(0, 1, batch, 1) for batch in range(4)
    }
    # Eight micro-batches on one stage, and one way there and back.
    assert 8 * 3 + 3 <= step_s <= 8 * 3 + 6


def test_a_slow_stage_hands_micro_batches_over() -> None:
    slow = work([[1.0, 4.0], [1.0, 1.0]], number=8)
    (with_s, moved), (without_s, none) = migrated(slow, delta=0), migrated(slow, delta=100)
    assert none == () and moved
    assert {(m.pipeline, m.to_pipeline) for m in moved} == {(0, 1)}
    assert with_s < 0.7 * without_s


@pytest.mark.parametrize("slow", [1.0, 1.5, 2.0, 3.0, 8.0, None])
@pytest.mark.parametrize("number", [2, 9])
def test_several_deltas_are_walked_as_each_by_itself(slow: float | None, number: int) -> None:
    job = work([[1.0, slow], [1.0, 1.0], [1.2, 1.0]], number)
    deltas = (0, 1, 2, 4, 1 << 30)
    each = migrate_each(job, deltas=deltas)
    assert each == tuple(migrate_each(job, deltas=(delta,))[0] for delta in deltas)


@pytest.mark.parametrize("slow", [{}, {5: 0.3}, {0: 0.5, 9: 0.7}, {14: 0.1}, {2: 0.6, 6: 0.6}])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("links", [FAST, Links(inside_bytes_per_s=1e6, between_bytes_per_s=2e5)])
def test_without_hand_overs_a_walk_takes_what_the_planner_says(
    slow: dict[int, float], stages: int, links: Links
) -> None:
    """Slow stages of some pipelines, slow messages: the same chunks in the same order."""
    data = 4 if stages == 1 else 2
    home = even_partition(
        MODEL, data=data, stages=stages, tensor=8 // data, rows=32, micro_batches=8
    )
    model = replace(MODEL, launch_s=0.1, head_s=2.0, gradient_share=1e-3)
    problem = problem_of(model, home, slow=slow, ranks_per_node=4, links=links)
    groups = [[cell.ranks for cell in pipeline.cells] for pipeline in home.pipelines]
    walk = walked(groups, home.pipelines[0].cuts, problem, delta=NEVER)
    assert walk.migrations == ()
    assert walk.step_s == pytest.approx(price(home, problem).step_s, rel=1e-9)
    uneven = with_other_shards(home, problem)
    assert uneven is not None
    rows = [
        replace(pipeline, micro_batches=of_home.micro_batches)
        for pipeline, of_home in zip(uneven.pipelines, home.pipelines, strict=True)
    ]
    cells = [pipeline.cells for pipeline in rows]
    (own,) = walks_of_cells(cells, problem, deltas=(NEVER,))
    of_rows = price(Partition(pipelines=tuple(rows)), problem).step_s
    assert own.step_s == pytest.approx(of_rows, rel=1e-9)


def test_resihp_may_leave_weight_gradients_for_idle_time() -> None:
    problem = problem_of(MODEL, HOME, slow={5: 0.6})
    plan = resihp(problem)
    program = [
        walked(plan.groups, plan.ends, problem, delta=delta, order=order).step_s
        for delta in DELTAS
        for order in (StageOrder.PROGRAM, StageOrder.READY)
    ]
    assert plan.order is StageOrder.SPLIT and plan.step_s < min(program)


def test_resihp_plans_the_healthy_job_as_it_is() -> None:
    problem = problem_of(MODEL, HOME)
    plan = resihp(problem)
    assert plan.ends == HOME.pipelines[0].cuts
    assert plan.standby == () and plan.migrations == ()
    assert plan.step_s <= price(HOME, problem).step_s * (1.0 + 1e-9)


def test_resihp_leaves_slow_ranks_out_and_beats_doing_nothing() -> None:
    problem = problem_of(MODEL, HOME, slow={5: 0.3})
    plan = resihp(problem)
    assert plan.standby == (5, 7)
    assert plan.step_s < 0.7 * price(HOME, problem).step_s


def test_resihp_needs_each_stage_once() -> None:
    dead = dict.fromkeys((0, 1, 2, 3), 0.0)
    assert resihp(problem_of(MODEL, HOME, slow=dead)).groups[0][0] == ()
    with pytest.raises(ValueError, match="stage 0 has no living device"):
        resihp(problem_of(MODEL, HOME, slow=dict.fromkeys(range(8), 0.0)))


def test_greyhound_divides_micro_batches_by_pace() -> None:
    assert least_variance(10, [1.0, 1.0, 2.0]) == (4, 4, 2)
    assert least_variance(3, [1.0, 1.0, 100.0]) == (1, 1, 1)
    plan = greyhound(problem_of(MODEL, HOME, slow={5: 0.5}))
    assert [len(pipeline.micro_batches) for pipeline in plan.pipelines] == [11, 5]
    with pytest.raises(ValueError, match="dead"):
        greyhound(problem_of(MODEL, HOME, slow={5: 0.0}))


def test_greyhound_brings_slow_groups_together() -> None:
    groups = s3(problem_of(MODEL, HOME, slow={1: 0.5, 13: 0.5}))
    assert [of_pipeline[0][0] for of_pipeline in groups] == [4, 0]
    assert [of_pipeline[1][0] for of_pipeline in groups] == [8, 12]


def test_malleus_gives_stragglers_stages_of_their_own() -> None:
    problem = problem_of(MODEL, HOME, slow={5: 0.5})
    assert parts_of(GROUP, problem, 1) == [(4, 6), (7,), (5,)]
    assert parts_of(GROUP, problem, 2) == [(4, 6)]
    assert parts_of((0, 1, 2, 3), problem, 1) == [(0, 1, 2, 3)]
    plan = malleus(problem)
    check_partition(plan, problem)
    assert price(plan, problem).step_s < 0.7 * price(HOME, problem).step_s
