"""No plan exceeds a device's memory, counted op by op; slow links cost time and change plans."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.controller.planning.model.partition import Partition
from pacekeeper.controller.planning.model.problem import Links, ModelCost, PartitionProblem
from pacekeeper.controller.planning.partition.planner import plan_partition
from pacekeeper.controller.planning.partition_cost.step_time import price
from pacekeeper.core.layout.pipeline_schedule import (
    ChunkKind,
    ChunkOp,
    Schedule,
    num_in_flight,
    pipeline_program,
)
from support.examples import examples
from support.partitions import even_partition, model_of, problem_of

MISSED = 0.02  # of a step: with a slow link more groups are tried, which may be better without it
SCHEDULES = st.sampled_from([Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE])
DENSE = model_of(6, attention=8, mlp=16)
MOE = model_of(6, attention=8, expert_s=3.0)
KEPT = {"whole_activation_bytes": 3e8, "replicated_bytes": 2e8}
MODELS = [
    replace(
        model,
        layers=tuple(replace(layer, **KEPT, **own) for layer in model.layers),
        head_activation_bytes=5e8,
    )
    for model, own in ((DENSE, {}), (MOE, {}), (MOE, {"slot_bytes": 1.5e9}))
]


def home_of(model: ModelCost) -> Partition:
    return even_partition(
        model, data=2, stages=2, tensor=2, rows=12, micro_batches=3,
        shares_experts=model.has_experts,
    )  # fmt: skip


def live_rows(sizes: Sequence[int], num_stages: int, stage: int, schedule: Schedule) -> int:
    """The most rows whose activations a stage holds at once, as its program runs."""
    program = pipeline_program(schedule, num_stages=num_stages, num_microbatches=len(sizes))
    frees = ChunkKind.WEIGHT_GRADIENT if schedule is Schedule.ZERO_BUBBLE else ChunkKind.BACKWARD
    held = most = 0
    for op in program.stages[stage]:
        if isinstance(op, ChunkOp):
            rows = sizes[op.micro_batch]
            held += rows * ((op.kind is ChunkKind.FORWARD) - (op.kind is frees))
            most = max(most, held)
    assert held == 0
    return most


def used_bytes(partition: Partition, problem: PartitionProblem) -> dict[int, float]:
    """What each rank holds, layer by layer and shard by shard."""
    model, used = problem.model, dict[int, float]()
    groups = partition.expert_groups()
    for at, stage, cell in partition.places():
        pipeline = partition.pipelines[at]
        rows = live_rows(pipeline.micro_batches, len(pipeline.cells), stage, partition.schedule)
        group = pipeline.expert_group
        sharers = 1 if group is None else len(groups[group, stage])
        for rank in cell.ranks:
            heads = sum(run.end - run.first for run in cell.attention if run.rank == rank)
            columns = sum(run.end - run.first for run in cell.mlp if run.rank == rank)
            parts = heads / model.num_attention_shards, columns / model.num_mlp_shards
            used[rank] = 0.0
            for layer in model.layers[cell.first_layer : cell.end_layer]:
                used[rank] += parts[0] * layer.attention_bytes + parts[1] * layer.mlp_bytes
                used[rank] += layer.replicated_bytes
                used[rank] += layer.slot_bytes or layer.expert_bytes / sharers
                used[rank] += rows * sum(parts) / 2 * layer.activation_bytes
                used[rank] += rows * layer.whole_activation_bytes
            if cell.end_layer == len(model.layers):
                used[rank] += max(pipeline.micro_batches) * model.head_activation_bytes
    return used


@given(SCHEDULES, st.integers(1, 7), st.integers(1, 9))
def test_a_stage_holds_as_many_micro_batches_as_its_program(
    schedule: Schedule, num_stages: int, num_microbatches: int
) -> None:
    for stage in range(num_stages):
        found = live_rows((1,) * num_microbatches, num_stages, stage, schedule)
        assert found == num_in_flight(
            schedule, stage, num_stages=num_stages, num_microbatches=num_microbatches
        )


def test_no_plan_exceeds_the_memory_of_a_device() -> None:
    drawn: Counter[str] = Counter()

    @settings(deadline=None, max_examples=examples(40))
    @given(
        model=st.sampled_from(MODELS),
        speeds=st.lists(st.sampled_from([1.0, 1.0, 1.0, 0.6, 0.3, 0.05]), min_size=8, max_size=8),
        memory=st.lists(
            st.sampled_from([1e15, 1e15, 2.4e10, 2.4e10, 2e10, 1.6e10]), min_size=8, max_size=8
        ),
        schedule=SCHEDULES,
    )
    def fits(
        model: ModelCost, speeds: list[float], memory: list[float], schedule: Schedule
    ) -> None:
        free = problem_of(model, home_of(model), slow=dict(enumerate(speeds)), schedule=schedule)
        devices = [replace(d, memory_bytes=memory[d.rank]) for d in free.devices]
        problem = replace(free, devices=tuple(devices))
        try:
            plan = plan_partition(problem)
        except ValueError:
            drawn["refused"] += 1
            return
        drawn["planned"] += 1
        used = used_bytes(plan.partition, problem)
        assert used.keys() == set(plan.partition.ranks)
        for rank, count in used.items():
            assert count <= memory[rank] * (1.0 + 1e-9)
            assert dict(plan.memory_bytes)[rank] >= count * (1.0 - 1e-9)
        unlimited = plan_partition(free).partition
        wanted = used_bytes(unlimited, problem)
        drawn["bound"] += any(count > memory[rank] for rank, count in wanted.items())

    fits()
    assert drawn["planned"] > 0.5 * drawn["refused"]
    assert 0 < drawn["bound"] < drawn["planned"]


def test_a_slower_link_never_makes_a_plan_cheaper() -> None:
    drawn: Counter[str] = Counter()

    @settings(deadline=None, max_examples=examples(40))
    @given(
        model=st.sampled_from([DENSE, MOE]),
        slow=st.sampled_from([{}, {3: 0.5}, {0: 0.3, 5: 0.6}]),
        rank=st.integers(0, 7),
        link=st.sampled_from([0.5, 0.1, 0.02]),
        ranks_per_node=st.sampled_from([1, 2, 4]),
        bytes_per_s=st.sampled_from([1e6, 1e7, 1e8]),
        schedule=SCHEDULES,
    )
    def costs(
        model: ModelCost,
        slow: dict[int, float],
        rank: int,
        link: float,
        ranks_per_node: int,
        bytes_per_s: float,
        schedule: Schedule,
    ) -> None:
        links = Links(inside_bytes_per_s=1e9, between_bytes_per_s=bytes_per_s)
        layers = [
            replace(layer, dispatch_bytes=4e6 if layer.expert_s else 0.0) for layer in model.layers
        ]
        problem = problem_of(
            replace(model, layers=tuple(layers), gradient_share=1e-4),
            home_of(model),
            slow=slow,
            ranks_per_node=ranks_per_node,
            links=links,
            schedule=schedule,
        )
        problem = replace(problem, prices=replace(problem.prices, bytes_per_s=1e15))
        devices = [replace(d, link_speed=link if d.rank == rank else 1.0) for d in problem.devices]
        slower = replace(problem, devices=tuple(devices))
        before, after = plan_partition(problem), plan_partition(slower)
        assert price(before.partition, slower).step_s >= before.step_s * (1.0 - 1e-9)
        assert after.step_s >= before.step_s * (1.0 - MISSED)
        assert after.step_s <= price(before.partition, slower).step_s * (1.0 + 1e-9)
        drawn["all"] += 1
        drawn["dearer"] += after.step_s > before.step_s * (1.0 + 1e-6)
        drawn["other"] += after.partition != before.partition

    costs()
    assert drawn["dearer"] >= 0.2 * drawn["all"]
    assert drawn["other"] >= 0.1 * drawn["all"]
