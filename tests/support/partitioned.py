"""Small jobs with stages and tensor groups, as the controller sees them."""

from collections.abc import Mapping

from pacekeeper.controller.state.planning_snapshot import PlanningSnapshot, RankTime
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.attachment import ModelShape
from pacekeeper.predictor.cost.forecast import Workload

NUM_SHARDS = 8


def staged_layout(
    *,
    stages: int = 2,
    data: int = 2,
    tensor: int = 2,
    layers: int = 8,
    experts: int = 4,
    generation: int = 5,
) -> Layout:
    """As a job starts; each expert on two ranks of its stage, or on the only one.

    Rank = tensor + T * (stage + S * data).
    """
    return even_layout(
        ranks=range(stages * data * tensor),
        num_layers=layers,
        num_experts=experts,
        replicas=min(2, data * tensor),
        num_virtual_shards=NUM_SHARDS,
        num_stages=stages,
        tensor_size=tensor,
        generation=generation,
    )


def work_of(layout: Layout, *, layer_s: float = 1.6, experts_s: float = 0.8) -> dict[int, RankTime]:
    """Of a step in which each layer takes so long on one rank of speed 1, and its experts."""
    work = {}
    for pipeline in layout.pipelines:
        for at, stage in enumerate(pipeline.stages):
            number, there = stage.num_layers, len(layout.ranks_of_layer(stage.first_layer))
            for run in stage.attention:
                part = pipeline.share_at(at) * (run.end - run.first) / layout.num_attention_shards
                work[run.rank] = RankTime(
                    dense_s=number * layer_s * part,
                    expert_s=number * experts_s / there if layout.experts[0] else 0.0,
                    fixed_s=0.0,
                )
    return work


def view_of(
    layout: Layout,
    *,
    slow: Mapping[int, float] | None = None,
    baseline: Layout | None = None,
    microbatches: int = 4,
    rows: int = 64,
    work: Mapping[int, RankTime] | None = None,
) -> PlanningSnapshot:
    """A job that runs `layout`, with even loads; a slow one has been so for long."""
    num_experts = len(layout.experts[0])
    return PlanningSnapshot(
        layout=layout,
        shape=ModelShape(
            num_layers=layout.num_layers,
            num_experts=num_experts,
            experts_per_token=2,
            rows_per_step=rows,
            slots_per_rank=max(1, num_experts),
            expert_bytes=1_000_000,
            dense_bytes=layout.num_layers * 8_000_000,
            splits_each_step=True,
        ),
        model=None,
        workload=Workload(
            num_rows=rows,
            tokens=160.0 * rows,
            sum_len_squared=1e4 * rows,
            loads=((1000.0,) * num_experts,) * layout.num_layers,
            num_microbatches=microbatches,
        ),
        slow=slow or {},
        baseline=baseline,
        step_s=0.0,
        steps_since_plan=100,
        is_provisional=False,
        num_load_steps=100,
        next_generation=9,
        slow_steps=100 if slow else None,
        slow_at_least=slow or {},
        work=work_of(layout) if work is None else work,
    )
