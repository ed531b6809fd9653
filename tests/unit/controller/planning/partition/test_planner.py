"""Plans for a partition: what they do with slow, dead and returned devices, and what they say."""

from dataclasses import replace

import pytest

from pacekeeper.controller.planning.model.partition import Partition
from pacekeeper.controller.planning.model.problem import Links, MovePrices, healthy
from pacekeeper.controller.planning.partition import planner
from pacekeeper.controller.planning.partition.constraints import check_partition
from pacekeeper.controller.planning.partition.planner import plan_partition
from pacekeeper.controller.planning.partition_cost.compute import message_s
from pacekeeper.controller.planning.partition_cost.state_transfer import moves
from pacekeeper.controller.planning.partition_cost.step_time import price
from pacekeeper.core.layout.pipeline_schedule import Schedule
from pacekeeper.simulator.baselines.initial_partition import baseline_partition
from support.partitions import FAST, even_partition, model_of, problem_of

MODEL = model_of(16, attention=32, mlp=64)
HOME = even_partition(MODEL, data=2, stages=2, tensor=4, rows=32, micro_batches=4)


def test_a_healthy_job_stays_as_it_is() -> None:
    plan = plan_partition(problem_of(MODEL, HOME))
    assert plan.partition == HOME
    assert plan.moves.total_bytes == 0.0 and plan.moves.move_s == 0.0
    assert plan.fluid_fraction == pytest.approx(1.0)
    assert plan.standby == plan.evicted == ()


def test_a_slow_rank_keeps_fewer_shards_and_its_pipeline_fewer_layers_or_rows() -> None:
    problem = problem_of(MODEL, HOME, slow={5: 0.5})
    plan = plan_partition(problem)
    check_partition(plan.partition, problem)
    runs = {run.rank: run for _, _, cell in plan.partition.places() for run in cell.mlp}
    sizes = {rank: run.end - run.first for rank, run in runs.items()}
    assert sizes[5] < 16 < max(sizes.values())
    assert plan.fluid_fraction > 0.95
    assert plan.step_s < 0.65 * price(HOME, problem).step_s
    assert f"{plan.fluid_fraction:.1%} of the fluid limit" in plan.reason


def test_the_fluid_limit_is_the_healthy_step_over_the_mean_speed() -> None:
    problem = problem_of(MODEL, HOME, slow={0: 0.2, 9: 0.0})
    healthy_s = price(HOME, healthy(problem)).step_s
    assert plan_partition(problem).fluid_s == pytest.approx(healthy_s * 16 / 14.2)


def test_the_price_of_an_even_pipeline_is_that_of_the_books() -> None:
    # 8 layers of 4 s over 4 ranks, forward and twice that: (4 + 2 - 1) micro-batches of 8 rows.
    assert price(HOME, problem_of(MODEL, HOME)).step_s == pytest.approx(5 * 8 * 8 * 3)
    # Zero bubble: the weight gradient fills what the backward pass of the other stage leaves.
    split = problem_of(MODEL, HOME, schedule=Schedule.ZERO_BUBBLE)
    assert price(split.now, split).step_s == pytest.approx((4 * 3 + 1) * 8 * 8)


def test_messages_and_gradients_take_their_time() -> None:
    model = model_of(4)
    links = Links(
        inside_bytes_per_s=1e15, between_bytes_per_s=1e9, inside_latency_s=0, between_latency_s=0
    )
    baseline = even_partition(model, data=2, stages=2, tensor=1, rows=1, micro_batches=1)
    problem = problem_of(model, baseline, ranks_per_node=1, links=links)
    # There and back through 2 x 2 layers of 4 s, one boundary of 1 MB each way, and a ring of two
    # for a ninth of 2 layers of 2 GB.
    assert price(baseline, problem).step_s == pytest.approx(48.0 + 0.002 + 4.0 / 9.0)
    one, *two = problem.devices
    assert message_s(3.0, [one], two[:1], model, links) == pytest.approx(3e-3)
    assert message_s(3.0, two[:2], [one, two[2]], model, links) == pytest.approx(1.5e-3)
    slow = replace(one, link_speed=0.5)
    assert message_s(3.0, [slow], two[:2], model, links) == pytest.approx(6e-3)


@pytest.mark.parametrize(("schedule", "chunks_s"), [
    # A row: 2 + 1 s of a rank that computes at half speed, 1 + 2 s of one with half a link.
    (Schedule.ONE_F_ONE_B, 3.0 + (4.0 + 1.0)),
    (Schedule.ZERO_BUBBLE, 3.0 + 3.0 + 2.0),
])  # fmt: skip
def test_who_shares_experts_waits_for_the_slowest_in_all_it_does(
    schedule: Schedule, chunks_s: float
) -> None:
    """Who computes longest need not be who tells longest: no step has both."""
    model = model_of(1, attention=1, mlp=1, expert_s=3.0)
    free = replace(model.layers[0], attention_bytes=0.0, expert_bytes=0.0, dispatch_bytes=1.0)
    model = replace(model, layers=(free,))
    links = Links(
        inside_bytes_per_s=1e15, between_bytes_per_s=1.0, inside_latency_s=0, between_latency_s=0
    )
    baseline = even_partition(
        model, data=2, stages=1, tensor=1, rows=5, micro_batches=1, shares_experts=True
    )
    problem = problem_of(model, baseline, slow={0: 0.5}, links=links, schedule=schedule)
    slow, far = problem.devices
    problem = replace(problem, devices=(slow, replace(far, link_speed=0.5)))
    experts_s = 10 * 3.0 / 1.5  # a forward pass of all rows, at the speed of both
    assert price(problem.now, problem).step_s == pytest.approx(5 * chunks_s + 3 * experts_s)


def test_pipelines_keep_their_expert_groups() -> None:
    model = model_of(4, attention=8, expert_s=3.0)
    baseline = even_partition(
        model, data=4, stages=2, tensor=1, rows=32, micro_batches=4, shares_experts=True
    )
    crossed = Partition(
        pipelines=tuple(
            replace(pipeline, expert_group=at % 2) for at, pipeline in enumerate(baseline.pipelines)
        )
    )
    problem = problem_of(model, crossed, slow={0: 0.5})
    plan = plan_partition(problem)
    check_partition(plan.partition, problem)
    assert [pipeline.expert_group for pipeline in plan.partition.pipelines] == [0, 1, 0, 1]
    rows = [pipeline.rows for pipeline in plan.partition.pipelines]
    assert rows[0] + rows[2] != rows[1] + rows[3]


def test_a_dead_rank_is_evicted_and_its_shards_go_to_its_group() -> None:
    problem = problem_of(MODEL, HOME, slow={6: 0.0})
    plan = plan_partition(problem)
    check_partition(plan.partition, problem)
    assert plan.evicted == (6,)
    assert 6 not in plan.partition.ranks
    assert plan.fluid_fraction > 0.93
    assert plan.moves.bytes_from_checkpoint == 0.0


def test_a_group_that_died_leaves_a_shorter_pipeline_or_one_less() -> None:
    problem = problem_of(MODEL, HOME, slow=dict.fromkeys(range(4, 8), 0.0), ranks_per_node=4)
    plan = plan_partition(problem)
    check_partition(plan.partition, problem)
    assert plan.evicted == (4, 5, 6, 7)
    assert plan.fluid_fraction > 0.8


def test_a_rank_too_slow_for_a_single_layer_stands_by() -> None:
    baseline = even_partition(MODEL, data=2, stages=4, tensor=1, rows=32, micro_batches=8)
    problem = problem_of(MODEL, baseline, slow={2: 0.05})
    plan = plan_partition(problem)
    check_partition(plan.partition, problem)
    assert plan.standby == (2,)
    assert plan.evicted == ()
    assert plan.fluid_fraction > 0.9


def test_what_no_living_rank_holds_comes_from_a_checkpoint() -> None:
    slow = dict.fromkeys((0, 4), 0.0)  # the first quarter of the first stage, in both pipelines
    plan = plan_partition(problem_of(MODEL, HOME, slow=slow))
    assert plan.moves.bytes_from_checkpoint == pytest.approx(8 * 2e9 / 4)


def test_groups_of_one_stage_change_pipelines_without_moving_a_byte() -> None:
    first, second = HOME.pipelines
    swapped = Partition(
        pipelines=(
            replace(first, cells=(second.cells[0], first.cells[1])),
            replace(second, cells=(first.cells[0], second.cells[1])),
        )
    )
    problem = problem_of(MODEL, HOME, prices=MovePrices(pause_s=2.0))
    assert moves(swapped, problem).total_bytes == 0.0
    assert moves(swapped, problem).move_s == 2.0
    upside = Partition(
        pipelines=tuple(
            replace(
                pipeline,
                cells=tuple(
                    replace(cell, attention=other.attention, mlp=other.mlp)
                    for cell, other in zip(pipeline.cells, reversed(pipeline.cells), strict=True)
                ),
            )
            for pipeline in HOME.pipelines
        )
    )
    # Every rank gets the other stage: 8 layers of 2 GB, a quarter of each.
    assert moves(upside, problem).total_bytes == pytest.approx(16 * 8 * 2e9 / 4)


def test_a_move_that_does_not_pay_is_not_made() -> None:
    dear = problem_of(MODEL, HOME, slow={5: 0.99}, prices=MovePrices(num_steps=1, pause_s=1e4))
    assert plan_partition(dear).partition == HOME


def test_recovery_brings_the_healthy_partition_back() -> None:
    slow = plan_partition(problem_of(MODEL, HOME, slow={5: 0.5})).partition
    back = plan_partition(replace(problem_of(MODEL, HOME), present=slow))
    assert back.step_s == pytest.approx(price(HOME, problem_of(MODEL, HOME)).step_s)


def test_pipelines_that_share_experts_stay_in_lock_step() -> None:
    model = model_of(8, attention=8, expert_s=3.0)
    baseline = even_partition(
        model, data=4, stages=2, tensor=1, rows=32, micro_batches=4, shares_experts=True
    )
    problem = problem_of(model, baseline, slow={1: 0.5, 6: 0.7})
    plan = plan_partition(problem)
    check_partition(plan.partition, problem)
    assert len({pipeline.cuts for pipeline in plan.partition.pipelines}) == 1
    assert {len(pipeline.micro_batches) for pipeline in plan.partition.pipelines} == {4}
    assert len({pipeline.rows for pipeline in plan.partition.pipelines}) > 1
    assert plan.fluid_fraction > 0.93


def test_the_stage_of_a_slow_rank_keeps_its_layers_where_rows_and_shards_do_more() -> None:
    model = model_of(8, attention=4, expert_s=3.0)
    baseline = even_partition(
        model, data=2, stages=2, tensor=2, rows=32, micro_batches=4, shares_experts=True
    )
    plan = plan_partition(problem_of(model, baseline, slow={3: 0.5}))
    assert plan.partition.pipelines[0].cuts == (4, 8)
    assert plan.fluid_fraction > 0.955


def test_memory_keeps_layers_off_a_rank() -> None:
    # Home takes 8 layers of 0.5 GB and 2 micro-batches of 8 rows of 0.1 GB per layer, quartered.
    problem = problem_of(MODEL, HOME, slow={0: 0.3}, memory_bytes=8.4e9)
    plan = plan_partition(problem)
    check_partition(plan.partition, problem)
    assert max(count for _, count in plan.memory_bytes) <= 8.4e9
    with pytest.raises(ValueError, match="holds the model"):
        plan_partition(problem_of(MODEL, HOME, slow={0: 0.3}, memory_bytes=3e8))


def test_stages_of_a_healthy_job_leave_room_for_the_head() -> None:
    model = model_of(8, head_s=8.0)
    devices = problem_of(model, HOME).devices
    baseline = baseline_partition(
        model,
        FAST,
        devices,
        tensor=4,
        data=2,
        stages=2,
        rows_per_batch=8,
        num_microbatches=4,
    )
    assert baseline.pipelines[0].cuts == (5, 8)
    with pytest.raises(ValueError, match="4 x 3 x 2 ranks, 16 devices"):
        baseline_partition(
            model,
            FAST,
            devices,
            tensor=4,
            data=3,
            stages=2,
            rows_per_batch=8,
            num_microbatches=4,
        )


def test_of_partitions_that_cost_the_same_the_one_without_a_bad_past_is_taken() -> None:
    """By rounding one is cheaper; where one is cheaper indeed, the past is no reason."""
    model = model_of(4)
    baseline = even_partition(model, data=3, stages=2, tensor=1, rows=12, micro_batches=2)
    problem = problem_of(model, baseline)
    devices = tuple(replace(one, is_doubted=one.rank == 3) for one in problem.devices)
    problem = replace(problem, devices=devices, prices=MovePrices(num_steps=10, pause_s=0.0))
    with_it, without = (
        Partition(pipelines=tuple(p for p in problem.baseline.pipelines if rank not in p.ranks))
        for rank in (5, 3)
    )
    stays = moves(problem.baseline, problem)

    def taken(other_s: float) -> Partition:
        found = [
            planner._Candidate(draft=None, partition=parts, step_s=step_s, moves=stays)
            for parts, step_s in ((with_it, 1.0), (without, other_s))
        ]
        return planner._least_doubted(found, problem).partition

    assert taken(1.0 + 1e-12) == without
    assert taken(1.0 + 1e-6) == with_it
