"""Plans that `benchmarks.partition_quality` counts are built by the engine, and it trains on them.

Ranks, stages, layers, runs, rows and schedules are those of the plans; a head has two dimensions,
an MLP shard one column, a row two tokens. Each plan of each draw is built rank by rank. Those of
the first draw train, of every draw in `make stress`: there micro-batches are larger than those of
the plans, and layers between which no layout of a test cuts are one layer.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod

import pytest
from benchmarks.partition_cases import CASES, Case, problem_of
from benchmarks.partition_quality import SEVERITIES, draw

from pacekeeper.controller.planning.model.partition import Partition
from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition.layout_codec import layout_of
from pacekeeper.controller.planning.partition.planner import plan_partition
from pacekeeper.core.layout.layout import Layout, Pipeline, ShardRun, Stage
from pacekeeper.core.layout.pipeline_schedule import Schedule
from pacekeeper.trainer.model.blocks import Holding
from support.engines import PlainRun, adamw, engine_of, own_batches, rows_of
from support.examples import stress
from support.rank_threads import ThreadGroup, run_ranks

CLIP = 0.05
KINDS = ((16, False), (16, True), (1, False))  # rows of a micro-batch, whether schedules change
DRAWS = 10  # of each cell, the benchmark's default
MOST_RANKS = {"weak": 16, "medium": 16, "severe": 32}  # more take minutes: `make stress`


def counted_plans(
    case: Case, severity: str, number: int
) -> tuple[list[Layout], list[PartitionProblem]]:
    """The healthy layout and the plans of a draw, and the problem of each."""
    speeds = draw(case, SEVERITIES[severity], number)
    partitions, problems = list[Partition](), list[PartitionProblem]()
    for rows_per_batch, may_change_schedule in KINDS:
        problem = problem_of(case, speeds, rows_per_batch=rows_per_batch)
        problem = replace(problem, may_change_schedule=may_change_schedule)
        if not partitions:
            partitions.append(problem.baseline)
            problems.append(problem)
        partitions.append(plan_partition(problem).partition)
        problems.append(problem)
    layouts = []
    for generation, partition in enumerate(partitions, 1):
        layout = layout_of(partition, ((),) * case.num_layers, generation=generation)
        idle = sorted(set(range(case.num_ranks)) - set(layout.working))
        layouts.append(replace(layout, standing_by=tuple(idle)))
    return layouts, problems


def sizes_of(layout: Layout) -> dict[str, int]:
    """The least model that can be divided so."""
    heads = layout.num_attention_shards
    return {
        "num_hidden_layers": layout.num_layers,
        "hidden_size": 2 * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": layout.num_mlp_shards,
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_counted_plan_is_built_rank_by_rank(case: Case) -> None:
    """The engine accepts it, each rank has tensors for its part, and they are the whole model."""
    counted = [
        layout
        for severity in SEVERITIES
        for number in range(DRAWS)
        for layout in counted_plans(case, severity, number)[0][1:]
    ]
    assert len(counted) == len(SEVERITIES) * DRAWS * len(KINDS)
    engine = engine_of("llama", layout=one_rank(counted[0]), sizes=sizes_of(counted[0]))
    cuts = engine.skeleton.cuts
    whole = sum(prod(engine.skeleton.specs[name].shape) for name in cuts)
    built: dict[Holding, int] = {}  # elements of tensors that are divided
    for layout in counted:
        engine.check_layout(layout, range(case.num_ranks))
        for pipeline in layout.pipelines:
            held = 0
            for rank in (rank for stage in pipeline.stages for rank in stage.group):
                holding = Holding.of(layout, rank)
                if holding not in built:
                    engine.store.rehold(holding)
                    tensors = map(engine.store.tensor, cuts)
                    built[holding] = sum(one.numel() for one in tensors if not one.is_meta)
                held += built[holding]
            assert held == whole


def one_rank(layout: Layout) -> Layout:
    """A layout of the same model on one rank."""
    runs = [(ShardRun(0, 0, n),) for n in (layout.num_attention_shards, layout.num_mlp_shards)]
    stage = Stage(first_layer=0, end_layer=layout.num_layers, attention=runs[0], mlp=runs[1])
    pipeline = Pipeline(stages=(stage,), batch_share=1.0)
    return replace(layout, pipelines=(pipeline,), standing_by=())


def with_fewer_layers(layouts: Sequence[Layout]) -> list[Layout]:
    """The layouts of a model in which layers that are together in all of them are one layer."""
    cuts = sorted({end for layout in layouts for one in layout.pipelines for end in one.ends})
    place = {0: 0} | {end: number for number, end in enumerate(cuts, 1)}

    def shorter(pipeline: Pipeline) -> Pipeline:
        stages = tuple(
            replace(stage, first_layer=place[stage.first_layer], end_layer=place[stage.end_layer])
            for stage in pipeline.stages
        )
        return replace(pipeline, stages=stages)

    return [
        replace(
            layout,
            pipelines=tuple(shorter(one) for one in layout.pipelines),
            experts=((),) * len(cuts),
        )
        for layout in layouts
    ]


def trained(case: Case, severity: str, number: int) -> bool:
    """Whether `make test` trains on the plans of a draw."""
    return number == 0 and case.num_ranks <= MOST_RANKS[severity]


@pytest.mark.parametrize(
    ("case", "severity", "number"),
    [one if trained(*one) else stress(*one) for one in product(CASES, SEVERITIES, range(DRAWS))],
    ids=lambda value: value.name if isinstance(value, Case) else str(value),
)
@pytest.mark.usefixtures("wide")
def test_each_plan_trains_as_one_process_does(case: Case, severity: str, number: int) -> None:
    wide, problems = counted_plans(case, severity, number)
    layouts = with_fewer_layers(wide)
    sizes = sizes_of(layouts[0])
    num_rows = [problem.rows_per_step for problem in problems]
    given = [rows_of(step, rows)[:, :3] for step, rows in enumerate(num_rows)]
    plain = PlainRun("llama", len(layouts), CLIP, rows=given.__getitem__, sizes=sizes)

    def work(group: ThreadGroup) -> list[float]:
        engine = engine_of("llama", group, layout=layouts[0], sizes=sizes, max_grad_norm=CLIP)
        adamw(engine)
        errors = []
        for step, layout in enumerate(layouts):
            if step:
                engine.apply(layout)
            result = engine.step(own_batches(engine, given[step], num_rows[step] // 2))
            errors.append(abs(result.loss.item() / plain.losses[step] - 1.0))
            errors.append(abs(result.grad_norm.item() / plain.norms[step] - 1.0))
        return errors

    for errors in run_ranks(case.num_ranks, work):
        assert max(errors) < 1e-11


def test_the_plans_differ_in_all_that_a_plan_of_a_dense_model_decides() -> None:
    plans = [
        layout
        for case in CASES
        for severity in SEVERITIES
        if trained(case, severity, 0)
        for layout in counted_plans(case, severity, 0)[0][1:]
    ]
    assert any(not layout.has_equal_cuts for layout in plans)
    assert any(layout.standing_by for layout in plans)
    assert {layout.schedule for layout in plans} == {Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE}
    assert any(len({share for _, share in layout.batch_shares}) > 1 for layout in plans)
    stages = [stage for layout in plans for stages in layout.mesh for stage in stages]
    for kind in ("attention", "mlp"):
        runs = [[run.end - run.first for run in getattr(stage, kind)] for stage in stages]
        assert any(max(run) > min(run) + 1 for run in runs)
