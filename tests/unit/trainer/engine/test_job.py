"""The shape that a rank reports has the sizes of its engine; micro-batches follow the shares."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pacekeeper.core.layout.layout import BlockKind
from pacekeeper.core.telemetry.attachment import ModelShape
from pacekeeper.trainer.engine.engine import Engine
from pacekeeper.trainer.engine.job import (
    batch_of,
    engine_options,
    make_optimizer,
    model_shape,
    prepare_job,
)
from support.engine_jobs import small_job

pytest.importorskip("transformers")


def shape_of(folder: Path, **own: object) -> tuple[ModelShape, Engine]:
    config = small_job(folder, **own)
    job = prepare_job(config, (0,))
    options = engine_options(config, job, torch.device("cpu"))
    engine = Engine(job.skeleton, job.source, layout=job.layout, options=options)
    engine.add_optimizer(make_optimizer(config, engine))
    return model_shape(config, job, engine, 1), engine


def size(tensors: object) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)  # type: ignore[attr-defined]


def test_sizes_are_those_of_the_engine(tmp_path: Path) -> None:
    shape, engine = shape_of(tmp_path)
    weights = size(engine.dense_parameters())
    assert shape.gradient_bytes == weights
    # AdamW: two moments of the weights' size, and a counter for each tensor, stacks of experts too.
    counters = 4 * len(list(engine.parameters()))
    assert shape.dense_bytes == 3 * weights + counters
    assert shape.optimizer_bytes == 2 * weights + counters
    blocks = list(engine.layout.blocks())
    number = {kind: sum(block.kind is kind for block in blocks) for kind in BlockKind}
    parts = (
        shape.embedding_bytes * number[BlockKind.EMBEDDING]
        + shape.head_bytes * number[BlockKind.HEAD]
        + shape.norm_router_bytes * number[BlockKind.NORM_ROUTER]
        + shape.attention_bytes * number[BlockKind.ATTENTION]
        + shape.mlp_bytes * number[BlockKind.DENSE_MLP]
    )
    final_norm = parts - shape.dense_bytes  # it may be counted with the head only
    assert abs(final_norm) <= 0.02 * shape.dense_bytes
    assert shape.expert_bytes * number[BlockKind.EXPERT] == pytest.approx(
        3 * size(engine.expert_parameters()), rel=0.02
    )
    assert shape.num_microbatches == 4 and shape.tokens_per_row == 24
    assert shape.memory_bytes > size(engine.parameters())


def test_layers_that_are_repeated_keep_their_inputs_only(tmp_path: Path) -> None:
    kept, _ = shape_of(tmp_path)
    repeated, _ = shape_of(tmp_path, checkpoint_activations=True)
    assert kept.activation_bytes > 0 == repeated.activation_bytes
    assert repeated.whole_activation_bytes == repeated.hidden_bytes == kept.hidden_bytes
    as_repeated = replace(
        kept,
        activation_bytes=0,
        whole_activation_bytes=repeated.whole_activation_bytes,
        memory_bytes=repeated.memory_bytes,
    )
    assert as_repeated == repeated


def test_a_job_reads_the_rows_of_its_micro_batches(tmp_path: Path) -> None:
    config = small_job(tmp_path)
    sampler = prepare_job(config, (0,)).sampler
    own = [range(2, 8, 3), range(4, 8, 3)]
    for places, one in zip(own, batch_of(config, sampler, 0, own), strict=True):
        assert one["input_ids"].equal(sampler.batch(0, places).input_ids)
