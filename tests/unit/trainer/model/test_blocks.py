"""A rank's blocks: what is allocated, which slot holds what, views that reach the parameters."""

import pytest
import torch

from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.model.blocks import BlockStore
from pacekeeper.trainer.model.initialization import SeededInitialization
from pacekeeper.trainer.model.skeleton import Skeleton, build_skeleton
from support.tiny_models import tiny_config

EXPERT = Block(BlockKind.EXPERT, 1, 2)


def stored(
    family: str, held: list[dict[int, int]], num_slots: int = 3, **own: object
) -> BlockStore:
    skeleton = build_skeleton(tiny_config(family, **own))
    store = BlockStore(skeleton, num_slots=num_slots)
    store.materialize(held, SeededInitialization(skeleton, 7))
    return store


def num_bytes(skeleton: Skeleton) -> int:
    tensors = {id(one): one for one in skeleton.module.parameters()}
    return sum(one.numel() * one.element_size() for one in tensors.values() if not one.is_meta)


def test_a_rank_allocates_its_slots_and_no_more() -> None:
    some, every = (
        stored("qwen3_moe", [{0: 1}, {3: 0, 1: 2}]),
        stored("qwen3_moe", [dict.fromkeys([0], 0)] * 2, num_slots=4),
    )
    expert = sum(4 * torch.Size(shape).numel() for shape in some.shapes(EXPERT).values())
    assert num_bytes(every.skeleton) - num_bytes(some.skeleton) == 2 * expert
    assert not any(one.is_meta for one in some.skeleton.module.parameters())
    assert not any(one.is_meta for one in some.skeleton.module.buffers())


def test_free_slots_are_zero_and_held_ones_are_the_experts() -> None:
    store = stored("qwen3_moe", [{0: 1}, {2: 0, 1: 2}])
    drawn = SeededInitialization(store.skeleton, 7).tensors(EXPERT)
    for name, part in store.parts(EXPERT).items():
        assert part.slot == 0
        assert torch.equal(part.tensor[0], drawn[name])
        assert part.tensor[1].abs().max() == 0
        assert part.tensor[2].abs().max() > 0


def test_every_tensor_of_the_model_is_in_one_block() -> None:
    for family in ("qwen3_moe", "deepseek_v3", "gpt_oss", "llama"):
        skeleton = build_skeleton(tiny_config(family))
        stacked = {name for one in skeleton.experts if one for name in one.tensors}
        names = [
            name
            for block, specs in skeleton.blocks.items()
            if block.kind is not BlockKind.EXPERT
            for name in specs
        ]
        assert sorted([*names, *stacked]) == sorted(skeleton.specs)
        saved = set(skeleton.module.state_dict())
        assert set(skeleton.specs) == saved


def test_blocks_hold_what_they_are_named_for() -> None:
    store = stored("deepseek_v3", [{}, {0: 0}])
    of = {
        block: {name.split(".", 3)[-1] for name in store.shapes(block)} for block in store.blocks()
    }
    assert "mlp.gate.e_score_correction_bias" in of[Block(BlockKind.NORM_ROUTER, 1)]
    assert "mlp.shared_experts.up_proj.weight" in of[Block(BlockKind.NORM_ROUTER, 1)]
    assert of[Block(BlockKind.DENSE_MLP, 0)] == {
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    }
    assert {name.split(".")[0] for name in of[Block(BlockKind.ATTENTION, 1)]} == {"self_attn"}
    assert set(store.shapes(Block(BlockKind.HEAD))) == {"model.norm.weight", "lm_head.weight"}
    assert set(store.shapes(Block(BlockKind.EMBEDDING))) == {"model.embed_tokens.weight"}


@pytest.mark.parametrize(
    ("model_type", "norm"),
    [("gpt2", "transformer.ln_f.weight"), ("mamba", "backbone.norm_f.weight")],
)
def test_the_final_norm_is_in_the_head_whatever_its_name(model_type: str, norm: str) -> None:
    skeleton = build_skeleton({"model_type": model_type})
    assert norm in skeleton.blocks[Block(BlockKind.HEAD)]


def test_a_tied_head_is_in_the_embedding_and_one_tensor() -> None:
    store = stored("qwen3_moe", [{}, {}], tie_word_embeddings=True)
    module = store.skeleton.module
    assert set(store.shapes(Block(BlockKind.HEAD))) == {"model.norm.weight"}
    assert module.get_parameter("lm_head.weight") is module.get_parameter(
        "model.embed_tokens.weight"
    )


def test_optimizer_state_moves_by_the_same_part() -> None:
    store = stored("gpt_oss", [{0: 1}, {2: 0}])
    for name, part in store.parts(EXPERT).items():
        moment = torch.arange(part.tensor.numel()).view_as(part.tensor)
        assert torch.equal(part.of(moment), moment[0])
        assert tuple(part.of(moment).shape) == store.shapes(EXPERT)[name]
    norm = store.parts(Block(BlockKind.HEAD))["model.norm.weight"]
    assert norm.of(norm.tensor) is norm.tensor


def test_views_write_through_to_the_parameters() -> None:
    store = stored("qwen3_moe", [{0: 1}, {2: 0}])
    store.write(EXPERT, {name: torch.full(s, 2.0) for name, s in store.shapes(EXPERT).items()})
    experts = store.skeleton.experts[1]
    assert experts is not None
    for parameter in experts.module.parameters():
        assert parameter[0].eq(2.0).all()
        assert parameter[1].eq(0.0).all()
    store.read(EXPERT)[experts.tensors[0]].fill_(3.0)
    assert next(iter(experts.module.parameters()))[0].eq(3.0).all()


def test_assign_zeroes_what_is_freed_and_keeps_what_stays() -> None:
    store = stored("qwen3_moe", [{}, {0: 0, 2: 1}])
    kept = {name: value.clone() for name, value in store.read(EXPERT).items()}
    store.assign(1, {2: 1, 3: 2})
    assert dict(store.slots[1]) == {2: 1, 3: 2}
    assert all(torch.equal(value, kept[name]) for name, value in store.read(EXPERT).items())
    freed = store.skeleton.experts[1]
    assert freed is not None
    assert all(one[0].abs().max() == 0 for one in freed.module.parameters())
    with pytest.raises(KeyError):
        store.parts(Block(BlockKind.EXPERT, 1, 0))


@pytest.mark.parametrize(
    "slots",
    [{4: 0}, {0: 3}, {0: -1}, {0: 1, 1: 1}, {2: 2}],
    ids=["expert", "slot", "negative", "twice", "moved"],
)
def test_a_wrong_assignment_is_refused_and_changes_nothing(slots: dict[int, int]) -> None:
    store = stored("qwen3_moe", [{}, {2: 1}])
    with pytest.raises(ValueError):
        store.assign(1, slots)
    assert dict(store.slots[1]) == {2: 1}


def test_a_foreign_block_is_refused() -> None:
    store = stored("qwen3_moe", [{}, {2: 1}])
    with pytest.raises(KeyError):
        store.parts(Block(BlockKind.DENSE_MLP, 0))
    own = {name: torch.zeros(shape) for name, shape in store.shapes(EXPERT).items()}
    with pytest.raises(ValueError):
        store.write(EXPERT, own | {"more": torch.zeros(1)})
    with pytest.raises(ValueError):
        store.write(EXPERT, {name: value[:1] for name, value in own.items()})
