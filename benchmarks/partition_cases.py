"""ResiHP's six models and its largest one, with the cluster and the shapes they ran on.

Sizes are those of the published model cards; shapes (tensor, data, pipeline) those of ResiHP,
section 6. Ours: devices of 140 TFLOP/s in training, micro-batches of 8192 tokens in 16 rows (what a
packer can put into a micro-batch or leave out), two micro-batches for each stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pacekeeper.controller.planning.model.problem import (
    Device,
    LayerCost,
    Links,
    ModelCost,
    MovePrices,
    PartitionProblem,
)
from pacekeeper.simulator.baselines.initial_partition import baseline_partition

FLOPS = 140e12
TOKENS_PER_BATCH = 8192
DOCUMENT_TOKENS = 512  # which attention looks at, however many are in a row
STATE_BYTES = 18  # of one parameter: two of weights and of gradients, master and two moments
ACTIVATION_BYTES = 16  # of one token and hidden unit, cheap parts computed again
MEMORY_BYTES = 80e9
RANKS_PER_NODE = 8
LINKS = Links(inside_bytes_per_s=200e9, between_bytes_per_s=25e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A dense model: hidden and MLP size, heads, vocabulary; and how it is divided."""

    name: str
    num_layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    vocabulary: int
    tensor: int
    data: int
    stages: int

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.data * self.stages


def _case(name: str, sizes: Sequence[int], shape: tuple[int, int, int]) -> Case:
    num_layers, hidden, mlp, heads, kv_heads, vocabulary = sizes
    tensor, data, stages = shape
    return Case(
        name=name,
        num_layers=num_layers,
        hidden=hidden,
        mlp=mlp,
        heads=heads,
        kv_heads=kv_heads,
        vocabulary=vocabulary,
        tensor=tensor,
        data=data,
        stages=stages,
    )


CASES = (
    _case("LLaMA2-7B", (32, 4096, 11008, 32, 32, 32000), (4, 2, 2)),
    _case("LLaMA2-13B", (40, 5120, 13824, 40, 40, 32000), (4, 2, 4)),
    _case("LLaMA2-30B", (60, 6656, 17920, 52, 52, 32000), (4, 2, 8)),
    _case("Qwen-7B", (28, 3584, 18944, 28, 4, 152064), (4, 2, 2)),
    _case("Qwen-14B", (48, 5120, 13824, 40, 8, 152064), (4, 2, 4)),
    _case("Qwen-32B", (64, 5120, 27648, 40, 8, 152064), (4, 2, 8)),
)
LLAMA_70B = _case("LLaMA2-70B", (80, 8192, 28672, 64, 8, 32000), (4, 4, 16))


def model_of(case: Case, *, rows_per_batch: int, flops: float = FLOPS) -> ModelCost:
    """Two operations for each parameter and token, and attention inside documents."""
    tokens = TOKENS_PER_BATCH / rows_per_batch
    attention = case.hidden**2 * 2 * (1 + case.kv_heads / case.heads)
    mlp = 3 * case.hidden * case.mlp
    ends = case.hidden * case.vocabulary
    layer = LayerCost(
        attention_s=tokens * (2 * attention + 2 * case.hidden * DOCUMENT_TOKENS) / flops,
        mlp_s=tokens * 2 * mlp / flops,
        attention_bytes=STATE_BYTES * attention,
        mlp_bytes=STATE_BYTES * mlp,
        replicated_bytes=STATE_BYTES * 2 * case.hidden,
        activation_bytes=ACTIVATION_BYTES * case.hidden * tokens,
    )
    return ModelCost(
        layers=(layer,) * case.num_layers,
        num_attention_shards=case.kv_heads,
        num_mlp_shards=case.mlp // 128,
        boundary_bytes=2 * case.hidden * tokens,
        embedding_bytes=STATE_BYTES * ends,
        head_s=tokens * 2 * ends / flops,
        head_bytes=STATE_BYTES * ends,
        launch_s=2e-4,
    )


def problem_of(
    case: Case,
    speeds: Sequence[float],
    *,
    rows_per_batch: int = 16,
    flops: float = FLOPS,
    data: int = 0,
    prices: MovePrices | None = None,
) -> PartitionProblem:
    """`speeds` of all ranks; `data` pipelines, if not as many as published; `flops` of each."""
    model = model_of(case, rows_per_batch=rows_per_batch, flops=flops)
    devices = tuple(
        Device(rank=rank, node=rank // RANKS_PER_NODE, memory_bytes=MEMORY_BYTES, speed=speed)
        for rank, speed in enumerate(speeds)
    )
    baseline = baseline_partition(
        model,
        LINKS,
        devices,
        tensor=case.tensor,
        data=data or case.data,
        stages=case.stages,
        rows_per_batch=rows_per_batch,
        num_microbatches=2 * case.stages,
    )
    return PartitionProblem(
        model=model, devices=devices, links=LINKS, baseline=baseline, prices=prices or MovePrices()
    )
