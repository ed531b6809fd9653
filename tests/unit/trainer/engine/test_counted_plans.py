"""Plans that `benchmarks.partition_quality` counts are put in force by the engine, and it trains.

Ranks, stages, runs, rows and schedules are those of the plans. Layers between which no layout of a
test cuts are one layer; a head has two dimensions, an MLP shard one column, a row two tokens.
Micro-batches are larger than those of the plans.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from benchmarks.partition_cases import CASES, Case, problem_of
from benchmarks.partition_quality import SEVERITIES, draw

from pacekeeper.controller.planning.model.partition import Partition
from pacekeeper.controller.planning.partition.layout_codec import layout_of
from pacekeeper.controller.planning.partition.planner import plan_partition
from pacekeeper.core.layout.layout import Layout, Pipeline
from pacekeeper.core.layout.pipeline_schedule import Schedule
from support.engines import PlainRun, adamw, engine_of, own_batches, rows_of
from support.examples import stress
from support.rank_threads import ThreadGroup, run_ranks

CLIP = 0.05
KINDS = ((16, False), (16, True), (1, False))  # rows of a micro-batch, whether schedules change
MOST_RANKS = {"weak": 16, "medium": 16, "severe": 32}  # more take minutes: `make stress`


def counted_plans(case: Case, severity: str) -> tuple[list[Layout], list[int]]:
    """The healthy layout and the plans of the first draw, and the rows of their steps."""
    speeds = draw(case, SEVERITIES[severity], 0)
    partitions, num_rows = list[Partition](), list[int]()
    for rows_per_batch, may_change_schedule in KINDS:
        problem = problem_of(case, speeds, rows_per_batch=rows_per_batch)
        problem = replace(problem, may_change_schedule=may_change_schedule)
        if not partitions:
            partitions.append(problem.baseline)
            num_rows.append(problem.rows_per_step)
        partitions.append(plan_partition(problem).partition)
        num_rows.append(problem.rows_per_step)
    layouts = []
    for number, partition in enumerate(partitions, 1):
        layout = layout_of(partition, ((),) * case.num_layers, generation=number)
        idle = sorted(set(range(case.num_ranks)) - set(layout.working))
        layouts.append(replace(layout, standing_by=tuple(idle)))
    return layouts, num_rows


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


@pytest.mark.parametrize(
    ("case", "severity"),
    [
        (case, severity) if case.num_ranks <= most else stress(case, severity)
        for case in CASES
        for severity, most in MOST_RANKS.items()
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
@pytest.mark.usefixtures("wide")
def test_each_plan_trains_as_one_process_does(case: Case, severity: str) -> None:
    wide, num_rows = counted_plans(case, severity)
    layouts = with_fewer_layers(wide)
    heads = layouts[0].num_attention_shards
    sizes = {
        "num_hidden_layers": layouts[0].num_layers,
        "hidden_size": 2 * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": layouts[0].num_mlp_shards,
    }
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
        for severity, most in MOST_RANKS.items()
        if case.num_ranks <= most
        for layout in counted_plans(case, severity)[0][1:]
    ]
    assert any(not layout.has_equal_cuts for layout in plans)
    assert any(layout.standing_by for layout in plans)
    assert {layout.schedule for layout in plans} == {Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE}
    assert any(len({share for _, share in layout.batch_shares}) > 1 for layout in plans)
    stages = [stage for layout in plans for stages in layout.mesh for stage in stages]
    for kind in ("attention", "mlp"):
        runs = [[run.end - run.first for run in getattr(stage, kind)] for stage in stages]
        assert any(max(run) > min(run) + 1 for run in runs)
