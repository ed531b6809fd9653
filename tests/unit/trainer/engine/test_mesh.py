"""Stages, tensor groups, pipelines and expert replicas at once train as one process does."""

from random import Random

import pytest
from benchmarks.random_meshes import random_mesh

from pacekeeper.core.layout.pipeline_schedule import Schedule
from support.engines import ROWS, PlainRun, adamw, engine_of, micro_batches, rows_of
from support.rank_threads import ThreadGroup, run_ranks
from support.tiny_models import tiny_config

SHARDS, STEPS, CLIP = 4, 4, 0.4


def shape_of(family: str) -> tuple[list[int], tuple[int, ...]]:
    """Experts by layer, and the layers with shared experts."""
    from pacekeeper.trainer.model.skeleton import build_skeleton

    skeleton = build_skeleton(
        tiny_config(family), num_attention_shards=SHARDS, num_mlp_shards=SHARDS
    )
    return [one.num_experts if one else 0 for one in skeleton.experts], skeleton.shared_mlp_layers


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.usefixtures("wide")
def test_a_mesh_trains(family: str, seed: int) -> None:
    plain = PlainRun(family, STEPS, CLIP)
    layers, shared = shape_of(family)
    layout = random_mesh(range(5), layers, SHARDS, 1, Random(seed), shared)
    schedule = (Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE)[seed % 2]

    def work(group: ThreadGroup) -> list[float]:
        engine = engine_of(
            family,
            group,
            layout=layout,
            shards=SHARDS,
            num_slots=4,
            max_grad_norm=CLIP,
            schedule=schedule,
        )
        adamw(engine)
        errors = []
        for step in range(STEPS):
            places = engine.rows(ROWS)
            batch = micro_batches(rows_of(step)[places.start : places.stop])
            result = engine.step(batch)
            errors.append(abs(result.loss.item() / plain.losses[step] - 1.0))
            errors.append(abs(result.grad_norm.item() / plain.norms[step] - 1.0))
        return errors

    for errors in run_ranks(5, work):
        assert max(errors) < 1e-11


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("wide")
def test_any_mesh_trains_as_one_process_does_while_it_changes(family: str, seed: int) -> None:
    plain = PlainRun(family, STEPS, CLIP)
    layers, shared = shape_of(family)

    def work(group: ThreadGroup) -> list[float]:
        chosen = Random(seed)
        layouts = [
            random_mesh(group.ranks, layers, SHARDS, step + 1, chosen, shared)
            for step in range(STEPS)
        ]
        engine = engine_of(
            family, group, layout=layouts[0], shards=SHARDS, num_slots=4, max_grad_norm=CLIP
        )
        adamw(engine)
        errors = []
        for step, layout in enumerate(layouts):
            if step:
                engine.apply(layout)
            places = engine.rows(ROWS)
            batch = micro_batches(rows_of(step)[places.start : places.stop])
            result = engine.step(batch)
            errors.append(abs(result.loss.item() / plain.losses[step] - 1.0))
            errors.append(abs(result.grad_norm.item() / plain.norms[step] - 1.0))
        return errors

    for errors in run_ranks(5, work):
        assert max(errors) < 1e-11
