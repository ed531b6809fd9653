"""Blocks with optimizer state: what is read from one engine and loaded into another is the same."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from pacekeeper.core.errors import ConfigError
from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.checkpoint.block_states import read_block
from pacekeeper.trainer.engine.engine import Engine
from pacekeeper.trainer.parallel.block_states import OPTIMIZER, TrainedBlocks
from pacekeeper.trainer.parallel.layouts import start_layout
from support.engines import engine_of, micro_batches, rows_of

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
optim = torch.optim
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: Mapping[str, tuple[Make, ...]] = {
    "adamw": (lambda ps: optim.AdamW(ps, lr=1e-2, weight_decay=0.1),),
    "fused": (lambda ps: optim.AdamW(ps, lr=1e-2, fused=True, amsgrad=True),),
    "sgd": (lambda ps: optim.SGD(ps, lr=1e-2, momentum=0.9),),
    "plain": (lambda ps: optim.SGD(ps, lr=1e-2),),
    "nadam": (lambda ps: optim.NAdam(ps, lr=1e-2),),
    "adagrad": (lambda ps: optim.Adagrad(ps, lr=1e-2, initial_accumulator_value=0.5),),
    "two": (lambda ps: optim.Adafactor(ps, lr=1e-2), lambda ps: optim.AdamW(ps, lr=1e-2)),
}
State = dict[Block, dict[str, Tensor]]


def made(
    family: str = "qwen3_moe", optimizers: str = "adamw", **options: Any
) -> tuple[Engine, TrainedBlocks]:
    engine = engine_of(family, dtype=torch.float32, num_slots=5, **options)
    parts = [engine.parameters()]
    if len(OPTIMIZERS[optimizers]) == 2:
        parts = [engine.dense_parameters(), engine.expert_parameters()]
    found = [make(part) for make, part in zip(OPTIMIZERS[optimizers], parts, strict=True)]
    for one in found:
        engine.add_optimizer(one)
    return engine, engine.states


def train(engine: Engine, steps: int) -> None:
    for _ in range(steps):
        engine.step(micro_batches(rows_of(engine.num_steps)))


def state_of(engine: Engine, blocks: TrainedBlocks) -> State:
    return {
        block: {name: tensor.clone() for name, tensor in read_block(blocks, block).items()}
        for block in engine.store.blocks()
    }


def hand_over(source: Engine, state: State, engine: Engine, blocks: TrainedBlocks) -> None:
    blocks.load(dict.fromkeys(state, True), state, source.states.num_updates)
    engine.go_back(source.layout, engine.groups, source.num_steps)


def assert_same(one: State, other: State) -> None:
    assert one.keys() == other.keys()
    for block, tensors in one.items():
        assert tensors.keys() == other[block].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, other[block][name]), (block, name)


@pytest.mark.parametrize(
    ("family", "optimizers", "steps"),
    [
        *((family, "adamw", 1) for family in FAMILIES[1:]),
        *(("qwen3_moe", name, 1) for name in OPTIMIZERS),
        *(("qwen3_moe", name, 0) for name in ("adamw", "nadam", "adagrad")),
    ],
)
def test_an_engine_goes_on_from_the_blocks_of_another(
    family: str, optimizers: str, steps: int
) -> None:
    bias = {"bias_rate": 1e-2} if family == "deepseek_v3" else {}
    engine, blocks = made(family, optimizers, **bias)
    train(engine, steps)
    state = state_of(engine, blocks)
    other, others = made(family, optimizers, **bias)
    train(other, 2)  # it comes from elsewhere
    hand_over(engine, state, other, others)
    assert_same(state_of(other, others), state)
    train(engine, 1)
    train(other, 1)
    assert_same(state_of(other, others), state_of(engine, blocks))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_with_all_shards_trains_as_if_there_were_none(family: str) -> None:
    shards = dict.fromkeys(("num_attention_shards", "num_mlp_shards"), 4)
    has_shared = family == "deepseek_v3"
    layout = start_layout([0, 4] if has_shared else [4, 4], [0], **shards)  # type: ignore[arg-type]
    layout = replace(layout, shared_mlp_layers=(1,) if has_shared else ())
    whole, _ = made(family)
    divided, blocks = made(family, layout=layout)
    assert divided.skeleton.cuts
    for engine in (whole, divided):
        train(engine, 2)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, divided.model.state_dict()[name]), name
    state = state_of(divided, blocks)
    other, others = made(family, layout=layout)
    hand_over(divided, state, other, others)
    assert_same(state_of(other, others), state)
    for engine in (divided, other):
        train(engine, 1)
    assert_same(state_of(other, others), state_of(divided, blocks))


def test_an_optimizer_that_looks_at_whole_tensors_cannot_have_shards() -> None:
    layout = start_layout([4, 4], [0], num_attention_shards=2)
    with pytest.raises(ConfigError):
        made(optimizers="two", layout=layout)


def test_tied_weights_are_in_one_block_and_stay_tied() -> None:
    from support.tiny_models import whole_store

    store = whole_store("qwen3_moe", tie_word_embeddings=True)
    optimizer = optim.AdamW(store.skeleton.module.parameters())
    for parameter in store.skeleton.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    blocks = TrainedBlocks(store, [optimizer])
    blocks.num_updates = 1
    name = "model.embed_tokens.weight"
    assert not any("lm_head" in spec.name for spec in blocks.specs(Block(BlockKind.HEAD)))
    state = {block: read_block(blocks, block) for block in store.blocks()}
    state = {b: {n: torch.full_like(t, 2.0) for n, t in ts.items()} for b, ts in state.items()}
    blocks.load(dict.fromkeys(state, True), state, 1)
    head, embedding = (
        store.skeleton.module.lm_head.weight,
        store.skeleton.module.get_parameter(name),
    )
    assert head is embedding and bool((embedding == 2.0).all())
    assert bool((optimizer.state[embedding]["exp_avg"] == 2.0).all())


@pytest.mark.parametrize("optimizers", ["adamw", "sgd", "two"])
def test_specs_are_those_of_what_is_read_before_and_after_the_first_step(optimizers: str) -> None:
    engine, blocks = made("deepseek_v3", optimizers)
    before = {block: blocks.specs(block) for block in engine.skeleton.blocks}
    for steps in (0, 1):
        train(engine, steps)
        for block in engine.store.blocks():
            assert blocks.specs(block) == before[block]
            found = read_block(blocks, block)
            assert list(found) == [spec.name for spec in before[block]]
            for spec in before[block]:
                tensor = found[spec.name]
                assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype)
                assert steps or spec.kind != OPTIMIZER or not tensor.any()


def test_blocks_that_are_not_held_have_specs() -> None:
    engine, blocks = made()
    held = [b for b in engine.store.blocks() if b.kind is not BlockKind.EXPERT]
    wanted = {block: blocks.specs(block) for block in engine.skeleton.blocks}
    blocks.load(dict.fromkeys(held, True), {}, 0)
    assert {block: blocks.specs(block) for block in engine.skeleton.blocks} == wanted


def test_experts_keep_their_state_in_other_slots_and_free_slots_are_zero() -> None:
    engine, blocks = made(optimizers="two")
    train(engine, 2)
    state = state_of(engine, blocks)
    dense = [block for block in state if block.kind is not BlockKind.EXPERT]
    experts = [Block(BlockKind.EXPERT, layer, e) for layer in (0, 1) for e in range(4)]
    for held in ([experts[3], experts[7]], [experts[3], experts[2], experts[7]]):
        blocks.load(dict.fromkeys([*dense, *held], True), {b: state[b] for b in held}, 2)
        found = state_of(engine, blocks)
        assert_same(found, {b: state[b] for b in found})
    (parameter, *_) = engine.store.stacked(1).values()
    optimizer = engine._optimizers[1]
    slot = engine.store.slots[1][3]
    for tensor in (parameter.detach(), optimizer.state[parameter]["exp_avg"]):
        free = [row for row in range(5) if row != slot]
        assert tensor[slot].any() and not tensor[free].any()
    blocks.load(dict.fromkeys(state, True), {b: state[b] for b in experts}, 2)
    engine._use_layout()
    assert engine.store.slots[0] != {e: e for e in range(4)}
    assert_same(state_of(engine, blocks), state)


def test_experts_of_several_steps_count_the_steps_of_the_routers() -> None:
    engine, blocks = made()
    states = []
    for _ in range(3):
        train(engine, 1)
        states.append(state_of(engine, blocks))
    (first, second, *_) = (b for b in states[0] if b.kind is BlockKind.EXPERT)
    name = f"{next(iter(engine.skeleton.blocks[first]))}.step"
    mixed = states[1] | {b: states[0][b] for b in states[0] if b.kind is BlockKind.EXPERT}
    for other, others in ((engine, blocks), made()):
        others.load(dict.fromkeys(mixed, True), mixed, 2)
        assert [read_block(others, b)[name].item() for b in (first, second)] == [2.0, 2.0]
        others.load(dict.fromkeys(mixed, True), {second: states[2][second]}, 2)
        assert read_block(others, second)[name].item() == 2.0, "the routers stay at 2 steps"
        moment = name.replace("step", "exp_avg")
        assert torch.equal(read_block(others, second)[moment], states[2][second][moment])
        assert other.num_steps in (0, 3)


def test_a_rank_without_experts_of_a_layer_counts_their_steps() -> None:
    """One that comes later is updated as on the rank that it came from."""
    engine, blocks = made()
    train(engine, 2)
    state = state_of(engine, blocks)
    dense = {b: t for b, t in state.items() if b.kind is not BlockKind.EXPERT}
    _, others = made()
    others.load(dict.fromkeys(dense, True), dense, 2)
    expert = Block(BlockKind.EXPERT, 1, 2)
    others.load(dict.fromkeys([*dense, expert], True), {expert: state[expert]}, 2)
    assert_same({expert: read_block(others, expert)}, {expert: state[expert]})


def test_a_block_without_its_optimizer_state_leaves_that_of_others_alone() -> None:
    engine, blocks = made()
    train(engine, 2)
    state = state_of(engine, blocks)
    frozen = Block(BlockKind.EXPERT, 1, 2)
    weights = {s.name: torch.ones(s.shape) for s in blocks.specs(frozen) if s.kind != OPTIMIZER}
    blocks.load(dict.fromkeys(state, True), {frozen: weights}, 2)
    found = state_of(engine, blocks)
    assert all(bool((found[frozen][name] == 1.0).all()) for name in weights)
    assert_same({b: t for b, t in found.items() if b != frozen},
                {b: t for b, t in state.items() if b != frozen})  # fmt: skip


def test_parameters_without_an_optimizer_have_weights_only() -> None:
    engine, blocks = made()
    names = {s.name.rpartition(".")[2] for s in blocks.specs(Block(BlockKind.EXPERT))}
    assert names == {"gate_up_proj", "down_proj", "exp_avg", "exp_avg_sq", "step"}
    alone = TrainedBlocks(engine.store, [])
    assert {s.kind for s in alone.specs(Block(BlockKind.EXPERT))} == {""}
    assert alone.parts(Block(BlockKind.EXPERT), OPTIMIZER) == {}


def test_a_parameter_that_was_never_updated_is_saved_as_such() -> None:
    """An encoder of images in a run of text: its first update shall be its first."""
    engine, blocks = made(optimizers="nadam")
    train(engine, 2)
    gate = engine.model.get_parameter("model.layers.0.self_attn.q_norm.weight")
    optimizer = engine._optimizers[0]
    del optimizer.state[gate]
    state = state_of(engine, blocks)
    other, others = made(optimizers="nadam")
    hand_over(engine, state, other, others)
    own = other.model.get_parameter("model.layers.0.self_attn.q_norm.weight")
    assert own not in other._optimizers[0].state


def test_an_optimizer_that_can_not_be_tried_is_refused_in_words() -> None:
    engine = engine_of("qwen3_moe")
    blocks = TrainedBlocks(engine.store, [optim.LBFGS(engine.parameters())])
    with pytest.raises(ConfigError):
        blocks.specs(Block(BlockKind.EMBEDDING))
