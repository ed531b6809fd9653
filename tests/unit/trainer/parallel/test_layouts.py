"""The layout that a job starts with, and which layouts fit a model."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks import tiny_families as families

from pacekeeper.core.errors import ConfigError
from pacekeeper.core.layout.layout import Layout, Pipeline, ShardRun, Stage
from pacekeeper.trainer.model.blocks import Holding
from pacekeeper.trainer.model.skeleton import Skeleton, build_skeleton
from pacekeeper.trainer.parallel.layouts import (
    check_layout,
    default_slots,
    most_experts_on_a_rank,
    start_layout,
)
from support.tiny_models import tiny_config

RANKS = range(8)
NUM_SLOTS = 64


def model(**own: object) -> Skeleton:
    config = tiny_config("deepseek_v3", num_hidden_layers=4, **own)
    return build_skeleton(config, num_attention_shards=4, num_mlp_shards=2)


def layout_of(skeleton: Skeleton, num_stages: int = 2, tensor_size: int = 2) -> Layout:
    return start_layout(
        [one.num_experts if one else 0 for one in skeleton.experts],
        RANKS,
        num_stages=num_stages,
        tensor_size=tensor_size,
        num_attention_shards=skeleton.num_attention_shards,
        num_mlp_shards=skeleton.num_mlp_shards,
        shared_mlp_layers=skeleton.shared_mlp_layers,
    )


@pytest.mark.parametrize(("stages", "size"), [(1, 1), (2, 2), (4, 2), (2, 4), (1, 4)])
def test_the_first_layout_fits_the_model_in_every_shape(stages: int, size: int) -> None:
    skeleton = model()
    layout = layout_of(skeleton, stages, size)
    check_layout(layout, skeleton, RANKS, NUM_SLOTS)
    assert set(layout.blocks()) == set(skeleton.blocks)
    for rank in RANKS:
        holding = Holding.of(layout, rank)
        assert [b for b in skeleton.blocks if holding.has(b) and b.kind != "expert"] == [
            b for b in skeleton.blocks if b.kind != "expert" and rank in layout.holders(b)
        ]


def test_slots_are_for_the_experts_of_a_stage() -> None:
    layout = layout_of(model(), 4, 2)  # each layer on two ranks
    assert default_slots(layout, [0, 4, 4, 4]) == 3
    assert default_slots(layout, [0, 4, 4, 4], spare_ranks=1) == 4


def uneven(stage: Stage) -> Stage:
    attention = tuple(
        map(ShardRun, stage.group, (0, 3), (3, 4))  # of four shards
    )
    return replace(stage, attention=attention)


def test_uneven_runs_fit() -> None:
    skeleton = model()
    layout = layout_of(skeleton)
    pipelines = [replace(p, stages=tuple(map(uneven, p.stages))) for p in layout.pipelines]
    check_layout(replace(layout, pipelines=tuple(pipelines)), skeleton, RANKS, NUM_SLOTS)


def other_cuts(layout: Layout) -> Layout:
    first, second = layout.pipelines[1].stages
    stages = replace(first, end_layer=1), replace(second, first_layer=1)
    changed = (layout.pipelines[0], Pipeline(stages=stages, batch_share=0.5))
    placed = list(layout.experts)
    placed[1] = tuple((replace(one[0], rank=0),) for one in placed[1])
    return replace(layout, pipelines=changed, experts=tuple(placed))


def others_shards(layout: Layout) -> Layout:
    return layout_of(build_skeleton(tiny_config("deepseek_v3", num_hidden_layers=4)), 2, 1)


@pytest.mark.parametrize(
    "change",
    [
        other_cuts,
        others_shards,
        lambda layout: replace(layout, shared_mlp_layers=()),
        lambda layout: replace(layout, standing_by=(9,)),
    ],
    ids=["cuts", "shards", "shared", "ranks"],
)
def test_a_layout_that_does_not_fit_is_refused(change: object) -> None:
    skeleton = model()
    layout = layout_of(skeleton)
    check_layout(layout, skeleton, RANKS, NUM_SLOTS)
    with pytest.raises(ConfigError):
        check_layout(change(layout), skeleton, RANKS, NUM_SLOTS)  # type: ignore[operator]


def test_each_rank_needs_memory_for_its_experts() -> None:
    skeleton = model()
    layout = layout_of(skeleton)
    slots = most_experts_on_a_rank(layout)
    check_layout(layout, skeleton, RANKS, slots)
    with pytest.raises(ConfigError):
        check_layout(layout, skeleton, RANKS, slots - 1)


def test_stages_need_an_embedding_and_a_head_of_their_own() -> None:
    skeleton = model(tie_word_embeddings=True)
    assert skeleton.has_ties
    check_layout(layout_of(skeleton, 1, 2), skeleton, RANKS, NUM_SLOTS)
    with pytest.raises(ConfigError):
        check_layout(layout_of(skeleton, 2, 2), skeleton, RANKS, NUM_SLOTS)


@pytest.mark.parametrize(("family", "stages"), [("glm_moe_dsa", 2), ("gemma4_text", 1)])
def test_families_that_pass_more_than_hidden_states_are_refused(family: str, stages: int) -> None:
    skeleton = build_skeleton(
        families.tiny_config(family), num_attention_shards=4, num_mlp_shards=2
    )
    check_layout(layout_of(skeleton, 1, 1), skeleton, RANKS, NUM_SLOTS)
    with pytest.raises(ConfigError):
        check_layout(layout_of(skeleton, stages, 2), skeleton, RANKS, NUM_SLOTS)


def test_each_rank_of_a_group_needs_an_attention_shard() -> None:
    skeleton = model()
    layout = layout_of(skeleton, 1, 2)
    (stage,) = layout.pipelines[0].stages
    one, other = stage.group
    heads, columns = stage.attention[-1].end, stage.mlp[-1].end
    apart = replace(
        stage,
        attention=(ShardRun(one, 0, heads), ShardRun(other, heads, heads)),
        mlp=(ShardRun(one, 0, 0), ShardRun(other, 0, columns)),
    )
    first, *others = layout.pipelines
    idle = replace(layout, pipelines=(replace(first, stages=(apart,)), *others))
    with pytest.raises(ConfigError):
        check_layout(idle, skeleton, RANKS, NUM_SLOTS)


def test_tensor_groups_need_a_divided_model() -> None:
    whole = build_skeleton(tiny_config("qwen3_moe"))
    layout = start_layout([4, 4], RANKS[:2])
    (stage,) = layout.pipelines[0].stages
    group = replace(
        stage,
        attention=(ShardRun(0, 0, 1), ShardRun(1, 1, 1)),
        mlp=(ShardRun(0, 0, 0), ShardRun(1, 0, 1)),
    )
    both = replace(layout, pipelines=(Pipeline(stages=(group,), batch_share=1.0),))
    with pytest.raises(ConfigError):
        check_layout(both, whole, RANKS[:2], NUM_SLOTS)


@pytest.mark.parametrize(
    "given", [{"num_stages": 3}, {"tensor_size": 8, "num_attention_shards": 4}, {"replicas": 9}]
)
def test_no_layout_of_the_wrong_number_of_ranks(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        start_layout([4, 4], RANKS, **given)
