"""Small simulated jobs of stages and tensor groups."""

from pacekeeper.controller.planning.model.problem import MovePrices
from pacekeeper.simulator.jobs.pipeline import PipelineJob
from support.partitions import even_partition, model_of, problem_of

PAUSE_S = 2.0


def pipeline_job(
    *,
    num_layers: int = 16,
    data: int = 2,
    stages: int = 2,
    tensor: int = 4,
    rows: int = 64,
    pause_s: float = PAUSE_S,
    memory_bytes: float = 1e15,
) -> PipelineJob:
    """Each layer 4 s of one row on one device: steps of minutes, so that pauses are small."""
    model = model_of(num_layers, attention=8, mlp=64)
    baseline = even_partition(
        model, data=data, stages=stages, tensor=tensor, rows=rows, micro_batches=2 * stages
    )
    prices = MovePrices(num_steps=1000, pause_s=pause_s)
    problem = problem_of(model, baseline, prices=prices, memory_bytes=memory_bytes)
    return PipelineJob(problem=problem, samples_per_row=1.0, tokens_per_row=512)
