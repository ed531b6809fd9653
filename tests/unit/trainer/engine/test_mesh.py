"""Stages, tensor groups, pipelines and expert replicas at once train as one process does."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from benchmarks.random_meshes import random_mesh
from torch import Tensor

from pacekeeper.core.errors import ConfigError
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.pipeline_schedule import RUN_SCHEDULES, Schedule
from pacekeeper.trainer.engine.micro_batches import MicroBatch, cross_entropy
from pacekeeper.trainer.parallel.layouts import start_layout
from support.engines import (
    BUILDING,
    ROWS,
    PlainRun,
    adamw,
    engine_of,
    micro_batches,
    own_batches,
    rows_of,
)
from support.rank_threads import ThreadGroup, run_ranks
from support.tiny_models import tiny_config

SHARDS, STEPS, CLIP = 4, 4, 0.4


def shape_of(family: str, **sizes: int) -> tuple[list[int], tuple[int, ...]]:
    """Experts by layer, and the layers with shared experts."""
    from pacekeeper.trainer.model.skeleton import build_skeleton

    with BUILDING:
        skeleton = build_skeleton(
            tiny_config(family, **sizes), num_attention_shards=SHARDS, num_mlp_shards=SHARDS
        )
    return [one.num_experts if one else 0 for one in skeleton.experts], skeleton.shared_mlp_layers


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.usefixtures("wide")
def test_a_mesh_trains(family: str, seed: int) -> None:
    plain = PlainRun(family, STEPS, CLIP)
    layers, shared = shape_of(family)
    layout = random_mesh(range(5), layers, SHARDS, 1, Random(seed), shared)
    layout = replace(layout, schedule=RUN_SCHEDULES[seed % 2])

    def work(group: ThreadGroup) -> list[float]:
        engine = engine_of(
            family, group, layout=layout, shards=SHARDS, num_slots=4, max_grad_norm=CLIP
        )
        adamw(engine)
        errors = []
        for step in range(STEPS):
            result = engine.step(own_batches(engine, rows_of(step)))
            errors.append(abs(result.loss.item() / plain.losses[step] - 1.0))
            errors.append(abs(result.grad_norm.item() / plain.norms[step] - 1.0))
        return errors

    for errors in run_ranks(5, work):
        assert max(errors) < 1e-11


def worst_error(family: str, layouts: Sequence[Layout], **sizes: int) -> float:
    """The largest of any rank that trains a step on each layout, beside one process: relative."""
    plain = PlainRun(family, len(layouts), CLIP, sizes=sizes)

    def work(group: ThreadGroup) -> float:
        engine = engine_of(
            family,
            group,
            layout=layouts[0],
            shards=SHARDS,
            sizes=sizes,
            num_slots=4,
            max_grad_norm=CLIP,
        )
        adamw(engine)
        worst = 0.0
        for step, layout in enumerate(layouts):
            if step:
                engine.apply(layout)
            result = engine.step(own_batches(engine, rows_of(step)))
            loss, norm = result.loss.item(), result.grad_norm.item()
            worst = max(worst, abs(loss / plain.losses[step] - 1.0))
            worst = max(worst, abs(norm / plain.norms[step] - 1.0))
        return worst

    return max(run_ranks(layouts[0].ranks, work))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "llama"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("wide")
def test_any_mesh_trains_as_one_process_does_while_it_changes(family: str, seed: int) -> None:
    layers, shared = shape_of(family)
    chosen = Random(seed)
    layouts = [
        random_mesh(range(5), layers, SHARDS, step + 1, chosen, shared) for step in range(STEPS)
    ]
    assert worst_error(family, layouts) < 1e-11


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
@pytest.mark.usefixtures("wide")
def test_data_tensor_pipeline_and_expert_parallelism_change_at_once(family: str) -> None:
    """Eight ranks, two pipelines of two stages of groups of two, replicas on any of a stage."""
    layers, shared = shape_of(family, num_hidden_layers=4)
    chosen = Random(3)
    layouts = [
        random_mesh(range(8), layers, SHARDS, step + 1, chosen, shared, shape=(2, 2))
        for step in range(STEPS)
    ]
    for layout in layouts:
        assert [[len(stage.group) for stage in stages] for stages in layout.mesh] == [[2, 2]] * 2
        assert any(len(replicas) > 1 for placed in layout.experts for replicas in placed)
    assert worst_error(family, layouts, num_hidden_layers=4) < 1e-11


def pipelines_of(family: str, ranks: tuple[int, ...], stages: int, size: int) -> Layout:
    layers, shared = shape_of(family)
    return start_layout(
        layers,
        ranks,
        num_stages=stages,
        tensor_size=size,
        num_attention_shards=SHARDS,
        num_mlp_shards=SHARDS,
        shared_mlp_layers=shared,
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.usefixtures("wide")
def test_only_the_schedule_changes_between_steps(family: str) -> None:
    """gpt_oss: experts with biases."""
    plain = PlainRun(family, STEPS, CLIP)

    def work(group: ThreadGroup) -> list[float]:
        layout = pipelines_of(family, group.ranks, 2, 1)
        engine = engine_of(family, group, layout=layout, shards=SHARDS, max_grad_norm=CLIP)
        adamw(engine)
        losses, moved = [], 0
        for step in range(STEPS):
            if step:
                schedule = RUN_SCHEDULES[step % 2]
                other = replace(engine.layout, generation=step + 1, schedule=schedule)
                moved += engine.apply(other).moved_bytes
            losses.append(engine.step(own_batches(engine, rows_of(step), 2)).loss.item())
        return [float(moved), *losses]

    for moved, *losses in run_ranks(4, work):
        assert moved == 0.0
        assert losses == pytest.approx(plain.losses, rel=1e-11)


@pytest.mark.usefixtures("wide")
def test_repeated_layers_and_zero_bubble_exclude_each_other() -> None:
    def work(group: ThreadGroup) -> bool:
        layout = pipelines_of("qwen3_moe", group.ranks, 2, 1)
        engine = engine_of(
            "qwen3_moe", group, layout=layout, shards=SHARDS, checkpoint_activations=True
        )
        adamw(engine)
        with pytest.raises(ConfigError):
            engine.apply(replace(layout, generation=2, schedule=Schedule.ZERO_BUBBLE))
        return engine.step(micro_batches(rows_of(0))).loss.isfinite().item() is True

    assert run_ranks(2, work) == [True, True]


@pytest.mark.usefixtures("wide")
def test_layers_are_repeated_for_the_micro_batch_that_goes_back() -> None:
    """Of two pipelines one has three micro-batches, the other one: the others are placeholders."""
    plain = PlainRun("qwen3_moe", 2, CLIP)

    def work(group: ThreadGroup) -> list[float]:
        layout = pipelines_of("qwen3_moe", group.ranks, 2, 1)
        shares = [
            replace(one, batch_share=s) for one, s in zip(layout.pipelines, (0.8, 0.2), strict=True)
        ]
        engine = engine_of(
            "qwen3_moe",
            group,
            layout=replace(layout, pipelines=tuple(shares)),
            shards=SHARDS,
            max_grad_norm=CLIP,
            checkpoint_activations=True,
        )
        adamw(engine)
        losses = []
        for step in range(2):
            losses.append(engine.step(own_batches(engine, rows_of(step), 2)).loss.item())
        return losses

    for losses in run_ranks(4, work):
        assert losses == pytest.approx(plain.losses, rel=1e-11)


@pytest.mark.usefixtures("wide")
def test_a_first_stage_that_is_frozen_goes_on() -> None:
    def work(group: ThreadGroup) -> float:
        engine = engine_of(
            "qwen3_moe", group, layout=pipelines_of("qwen3_moe", group.ranks, 2, 1), shards=SHARDS
        )
        for name, parameter in engine.model.named_parameters():
            parameter.requires_grad_(name.startswith(("model.layers.1.", "model.norm", "lm_head")))
        adamw(engine)
        batch = micro_batches(rows_of(0))
        return engine.step(batch).grad_norm.item()

    first, second = run_ranks(2, work)
    assert first == second > 0.0


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(("stages", "size"), [(1, 2), (2, 1)])
def test_all_ranks_refuse_a_loss_that_is_no_sum_and_other_micro_batches(
    stages: int, size: int
) -> None:
    def mean(logits: Tensor, batch: MicroBatch) -> Tensor:
        return cross_entropy(logits, batch) / batch["labels"].numel()

    def work(group: ThreadGroup) -> bool:
        layout = pipelines_of("qwen3_moe", group.ranks, stages, size)
        engine = engine_of("qwen3_moe", group, layout=layout, shards=SHARDS)
        adamw(engine)
        with pytest.raises(ConfigError):
            engine.step(micro_batches(rows_of(0)), mean)
        with pytest.raises(ConfigError):
            engine.step(micro_batches(rows_of(0), 3 if group.rank else 4))
        with pytest.raises(ConfigError):
            engine.step(micro_batches(rows_of(group.rank)))
        return True

    assert run_ranks(2, work) == [True, True]


@pytest.mark.usefixtures("wide")
def test_recurrent_layers_change_their_tensor_group() -> None:
    plain = PlainRun("qwen3_next", 2, CLIP)

    def work(group: ThreadGroup) -> list[float]:
        engine = engine_of(
            "qwen3_next",
            group,
            layout=pipelines_of("qwen3_next", group.ranks, 1, 2),
            shards=SHARDS,
            max_grad_norm=CLIP,
        )
        adamw(engine)
        losses = []
        for step, size in enumerate((2, 1)):
            if step:
                layout = pipelines_of("qwen3_next", group.ranks, 1, size)
                engine.apply(replace(layout, generation=2))
            losses.append(engine.step(own_batches(engine, rows_of(step))).loss.item())
        return losses

    for losses in run_ranks(2, work):
        assert losses == pytest.approx(plain.losses, rel=1e-11)


@pytest.mark.usefixtures("wide")
def test_a_step_without_rows_may_come_after_one_with_rows() -> None:
    def work(group: ThreadGroup) -> float:
        engine = engine_of("qwen3_moe", group)
        adamw(engine)
        engine.step(micro_batches(rows_of(0)))
        return engine.step([]).grad_norm.item()

    assert run_ranks(2, work) == [0.0, 0.0]


@pytest.mark.usefixtures("wide")
def test_a_loss_over_the_batch_needs_one_stage() -> None:
    def work(group: ThreadGroup) -> bool:
        layout = pipelines_of("qwen3_moe", group.ranks, 1, 2)
        engine = engine_of(
            "qwen3_moe", group, layout=layout, shards=SHARDS, balance="batch", balance_weight=0.1
        )
        adamw(engine)
        with pytest.raises(ConfigError):
            engine.apply(replace(pipelines_of("qwen3_moe", group.ranks, 2, 1), generation=2))
        return engine.step(micro_batches(rows_of(0), ROWS)).loss.isfinite().item() is True

    assert run_ranks(2, work) == [True, True]
