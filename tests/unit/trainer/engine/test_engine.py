"""The engine on several ranks trains as one process does, and rejects what it can not train."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch

from pacekeeper.core.errors import ConfigError, DataError
from pacekeeper.core.layout.layout import Block
from pacekeeper.core.layout.resize.shrink import ReplicationFloor, shrink
from pacekeeper.trainer.engine.engine import Engine
from pacekeeper.trainer.engine.micro_batches import cross_entropy
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.model.checkpoint_reader import CheckpointReader
from pacekeeper.trainer.model.initialization import SeededInitialization
from pacekeeper.trainer.model.skeleton import build_skeleton
from pacekeeper.trainer.parallel.layouts import start_layout
from support.engines import (
    BUILDING,
    ROWS,
    PlainRun,
    adamw,
    engine_of,
    held_tensors,
    micro_batches,
    random_layout,
    rows_of,
)
from support.layouts import with_shares
from support.rank_threads import ThreadGroup, run_ranks
from support.tiny_models import tiny_config

RANKS, STEPS, CLIP = 3, 5, 0.4
SIZES = ((3, 0, 4), (1, 5, 1), (0, 0, 7), (2, 3, 2), (7, 0, 0))


def own(step: int, rank: int) -> Any:
    begin = sum(SIZES[step][:rank])
    return micro_batches(rows_of(step)[begin : begin + SIZES[step][rank]])


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.usefixtures("wide")
def test_ranks_train_as_one_process_does(family: str, moves: bool) -> None:
    plain = PlainRun(family, STEPS, CLIP)
    template = engine_of(family)

    def work(group: ThreadGroup) -> list[float]:
        counts = [one.num_experts if one else 0 for one in template.skeleton.experts]
        engine = engine_of(
            family,
            group,
            layout=start_layout(counts, group.ranks, replicas=2),
            num_slots=4,
            max_grad_norm=CLIP,
            checkpoint_activations=moves,
        )
        adamw(engine)
        chosen = Random(1)
        errors = []
        for step in range(STEPS):
            if moves and step:
                applied = engine.apply(random_layout(engine.layout, chosen))
                assert applied.generation == engine.layout.generation == step + 1
            result = engine.step(own(step, group.rank))
            errors.append(abs(result.loss.item() / plain.losses[step] - 1.0))
            errors.append(abs(result.grad_norm.item() / plain.norms[step] - 1.0))
            assert result.num_targets == rows_of(step)[:, 1:].numel()
        for name, expert, tensor in held_tensors(engine):
            whole = plain.parameters[name].detach()
            expected = whole if expert is None else whole[expert]
            errors.append(((tensor - expected).abs().max() / expected.abs().max()).item())
        return errors

    for errors in run_ranks(RANKS, work):
        assert max(errors) < 1e-11


@pytest.mark.usefixtures("wide")
def test_a_rank_stands_by_and_works_again_as_if_it_always_had() -> None:
    plain = PlainRun("qwen3_moe", 3, CLIP)

    def work(group: ThreadGroup) -> tuple[list[int], list[float]]:
        home = start_layout([4, 4], group.ranks, replicas=2)
        fewer = shrink(home, dead=[1], generation=2, floor=ReplicationFloor(replicas=2))
        layouts = [home, replace(fewer, standing_by=(1,)), replace(home, generation=3)]
        engine = engine_of("qwen3_moe", group, layout=home, num_slots=4, max_grad_norm=CLIP)
        adamw(engine)
        rows, losses = [], []
        for step, layout in enumerate(layouts):
            if step:
                engine.apply(layout)
            places = engine.rows(ROWS)
            rows.append(len(places))
            batch = rows_of(step)[places.start : places.stop]
            losses.append(engine.step(micro_batches(batch)).loss.item())
        return rows, losses

    for rank, (rows, losses) in enumerate(run_ranks(RANKS, work)):
        assert (rows[1] == 0) == (rank == 1) and 0 not in (rows[0], rows[2])
        assert losses == pytest.approx(plain.losses, rel=1e-11)


@pytest.mark.usefixtures("wide")
def test_a_dense_model_trains_with_its_rows_divided() -> None:
    plain = PlainRun("llama", 2, CLIP)

    def work(group: ThreadGroup) -> list[float]:
        engine = engine_of("llama", group, max_grad_norm=CLIP)
        adamw(engine)
        losses = [engine.step(own(0, group.rank)).loss.item()]
        engine.apply(replace(engine.layout, generation=2))
        return [*losses, engine.step(own(1, group.rank)).loss.item()]

    for losses in run_ranks(RANKS, work):
        assert losses == pytest.approx(plain.losses, rel=1e-12)


def test_what_is_frozen_is_neither_updated_nor_in_the_norm() -> None:
    def work(group: ThreadGroup) -> tuple[float, bool, bool]:
        engine = engine_of("qwen3_moe", group, layout=start_layout([4, 4], group.ranks, 2))
        for name, parameter in engine.model.named_parameters():
            parameter.requires_grad_("experts.down_proj" in name)
        before = {(n, e): t.clone() for n, e, t in held_tensors(engine)}
        adamw(engine)
        norm = engine.step(own(0, group.rank)).grad_norm.item()
        changed = {n for n, e, t in held_tensors(engine) if not torch.equal(before[n, e], t)}
        engine.apply(random_layout(engine.layout, Random(0)))
        engine.step(own(1, group.rank))
        return norm, bool(changed), all("experts.down_proj" in name for name in changed)

    whole = engine_of("qwen3_moe")
    adamw(whole)
    bound = whole.step(micro_batches(rows_of(0))).grad_norm.item()
    for norm, is_trained, is_alone in run_ranks(RANKS, work):
        assert is_trained and is_alone
        assert 0.0 < norm < bound


def test_ranks_that_differ_in_an_optimizer_or_in_what_is_frozen_all_raise() -> None:
    def refused(group: ThreadGroup, change: Callable[[Engine], dict[str, Any]]) -> str:
        engine = engine_of("qwen3_moe", group)
        settings = change(engine) if group.rank == 1 else {}
        with pytest.raises(ConfigError) as raised:
            engine.add_optimizer(torch.optim.SGD(engine.parameters(), **{"lr": 1.0} | settings))
        return str(raised.value).partition(";")[0]

    def freeze(engine: Engine) -> dict[str, Any]:
        engine.dense_parameters()[0].requires_grad_(False)
        return {}

    for change in (freeze, lambda _: {"lr": 0.5}, lambda _: {"momentum": 0.9}):
        assert len(set(run_ranks(2, partial(refused, change=change)))) == 1


@pytest.mark.usefixtures("wide")
def test_a_prepared_step_changes_nothing_and_can_be_prepared_again_on_another_layout() -> None:
    def work(group: ThreadGroup) -> list[float]:
        engine = engine_of("deepseek_v3", group, num_slots=4, bias_rate=1e-3)
        plain = engine_of("deepseek_v3", group, num_slots=4, bias_rate=1e-3)
        for one in (engine, plain):
            adamw(one)
            one.step(own(0, group.rank))
        before = {(n, e): t.clone() for n, e, t in held_tensors(engine)}
        first = engine.prepare_step(own(1, group.rank))
        abandoned = engine.prepare_move(random_layout(engine.layout, Random(1)))
        assert abandoned.layout.generation == 2
        assert all(torch.equal(before[n, e], t) for n, e, t in held_tensors(engine))
        engine.commit_step(engine.prepare_step(own(2, group.rank)), is_applied=False)
        assert all(torch.equal(before[n, e], t) for n, e, t in held_tensors(engine))
        engine.commit_move(engine.prepare_move(random_layout(engine.layout, Random(2))))
        again = engine.commit_step(engine.prepare_step(own(1, group.rank)))
        expected = plain.step(own(1, group.rank))
        assert (engine.num_steps, plain.num_steps) == (3, 2)
        pairs = [(again, expected), (first.result, expected)]
        errors = [abs(a.loss.item() / b.loss.item() - 1.0) for a, b in pairs]
        engine.apply(replace(plain.layout, generation=3))
        updated = {(n, e): t for n, e, t in held_tensors(plain)}
        errors += [
            ((t - updated[n, e]).abs().max() / updated[n, e].abs().max()).item()
            for n, e, t in held_tensors(engine)
            if bool(updated[n, e].any())
        ]
        return errors

    for errors in run_ranks(RANKS, work):
        assert max(errors) < 1e-11


def test_moves_leave_no_hooks_on_parameters() -> None:
    def work(group: ThreadGroup) -> set[int]:
        engine = engine_of("qwen3_moe", group, num_slots=4)
        adamw(engine)
        for seed in range(3):
            engine.apply(random_layout(engine.layout, Random(seed)))
        return {len(p._post_accumulate_grad_hooks or ()) for p in engine.dense_parameters()}

    assert run_ranks(2, work) == [{1}, {1}]


@pytest.mark.usefixtures("wide")
def test_evaluation_changes_nothing_and_agrees_with_the_next_step() -> None:
    def work(group: ThreadGroup) -> tuple[float, float]:
        engine = engine_of("qwen3_moe", group)
        adamw(engine)
        before = {(n, e): t.clone() for n, e, t in held_tensors(engine)}
        evaluated = engine.evaluate(own(0, group.rank)).item()
        assert all(torch.equal(before[n, e], t) for n, e, t in held_tensors(engine))
        assert engine.model.training
        return evaluated, engine.step(own(0, group.rank)).loss.item()

    for evaluated, trained in run_ranks(RANKS, work):
        assert evaluated == pytest.approx(trained, rel=1e-12)


def test_an_evaluation_needs_no_optimizer_and_leaves_gradients_alone() -> None:
    engine = engine_of("qwen3_moe")
    parameter = engine.dense_parameters()[0]
    parameter.grad = torch.ones_like(parameter)
    assert engine.evaluate(micro_batches(rows_of(0))).item() > 0.0
    assert parameter.grad is not None and bool((parameter.grad == 1.0).all())


def test_mixed_precision_keeps_masters_routers_and_replicas_exact() -> None:
    def work(group: ThreadGroup) -> tuple[list[float], dict[Any, torch.Tensor]]:
        kinds: list[torch.dtype] = []
        engine = engine_of(
            "qwen3_moe",
            group,
            dtype=torch.float32,
            compute_dtype=torch.bfloat16,
            layout=start_layout([4, 4], group.ranks, replicas=2),
        )
        optimizer = adamw(engine)
        experts = engine.skeleton.experts[1]
        assert experts is not None
        computing, engine._experts.compute = engine._experts.compute, None  # type: ignore[assignment]

        def compute(module: Any, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            kinds.append(rows.dtype)
            return computing(module, rows, counts)

        engine._experts.compute = compute
        gates: list[torch.dtype] = []
        gate = engine.model.get_submodule(experts.name.replace("experts", "gate"))
        gate.register_forward_hook(lambda _m, _i, output: gates.append(output[0].dtype))
        losses = [
            engine.step(
                micro_batches(rows_of(step)[2 * group.rank : 2 * group.rank + 2])
            ).loss.item()
            for step in range(4)
        ]
        assert set(kinds) == {torch.bfloat16}
        assert set(gates) == {torch.float32}
        assert {p.dtype for p in engine.parameters()} == {torch.float32}
        state = optimizer.state[engine.expert_parameters()[0]]
        assert state["exp_avg"].dtype == torch.float32
        return losses, {(n, e): t.clone() for n, e, t in held_tensors(engine)}

    plain = PlainRun("qwen3_moe", 4, 1e9)
    ranks = run_ranks(4, work)
    assert ranks[0][0] == pytest.approx(plain.losses, rel=0.02)
    assert ranks[0][0] != pytest.approx(plain.losses, rel=1e-6)
    for _, held in ranks[1:]:
        for key, tensor in held.items():
            if key in ranks[0][1]:
                assert torch.equal(tensor, ranks[0][1][key])


def test_one_foreign_token_stops_all_ranks_with_the_same_reason() -> None:
    def work(group: ThreadGroup) -> str:
        engine = engine_of("qwen3_moe", group)
        adamw(engine)
        batch = own(0, group.rank)
        if group.rank == 2:
            batch[0]["input_ids"][0, 0] = 96
        with pytest.raises(DataError) as raised:
            engine.step(batch)
        return str(raised.value)

    assert len(set(run_ranks(RANKS, work))) == 1


def test_ranks_that_were_given_different_things_do_not_start() -> None:
    def work(group: ThreadGroup) -> bool:
        with pytest.raises(ConfigError, match="another options"):
            engine_of("qwen3_moe", group, num_slots=3 + (group.rank == 1))
        return True

    assert run_ranks(RANKS, work) == [True] * RANKS


def test_a_checkpoint_that_one_rank_can_not_read_stops_all(tmp_path: Any) -> None:
    engine_of("qwen3_moe").export(tmp_path)

    def work(group: ThreadGroup) -> bool:
        groups = EngineGroups(exchange=group, gradients=group, control=group, snapshots=group)
        with BUILDING:
            skeleton = build_skeleton(tmp_path, torch.float64)
            source = CheckpointReader(skeleton, tmp_path)
        if group.rank == 1:  # its file system lost it
            source.tensors = lost  # type: ignore[method-assign]
        with pytest.raises(DataError if group.rank == 1 else ConfigError):
            Engine(skeleton, source, groups=groups)
        return True

    assert run_ranks(RANKS, work) == [True] * RANKS


def lost(block: Block) -> dict[str, torch.Tensor]:
    raise DataError(f"{block}: stale file handle")


def test_a_step_that_was_interrupted_leaves_nothing_behind() -> None:
    def work(group: ThreadGroup) -> tuple[float, float, int]:
        engines = [engine_of("qwen3_moe", group, checkpoint_activations=True) for _ in range(2)]
        for engine in engines:
            adamw(engine)
        broken, _ = engines

        def failing(logits: torch.Tensor, batch: Any) -> torch.Tensor:
            if calls:
                raise KeyError("a fault of the caller")
            calls.append(1)
            return cross_entropy(logits, batch)

        calls: list[int] = []
        with pytest.raises(KeyError):
            broken.step(micro_batches(rows_of(0)[:4], 2), failing)
        for parameter in broken.parameters():
            parameter.grad = torch.ones_like(parameter)
        results = [engine.step(own(0, group.rank)) for engine in engines]
        routed = [sum(int(rows.sum()) for rows in result.routed.values()) for result in results]
        assert routed[0] == routed[1]
        return results[0].grad_norm.item(), results[1].grad_norm.item(), routed[0]

    for broken, clean, routed in run_ranks(RANKS, work):
        assert broken == clean
        assert routed == 2 * 2 * rows_of(0)[:, 1:].numel()


@pytest.mark.parametrize("what", ["layout", "batch", "seed"])
def test_what_is_wrong_on_one_rank_is_an_error_on_all(what: str) -> None:
    def work(group: ThreadGroup) -> bool:
        with pytest.raises(ConfigError):
            if what == "seed":
                groups = EngineGroups(
                    exchange=group, gradients=group, control=group, snapshots=group
                )
                with BUILDING:
                    skeleton = build_skeleton(tiny_config("qwen3_moe"))
                    source = SeededInitialization(skeleton, group.rank)
                Engine(skeleton, source, groups=groups)
            engine = engine_of("qwen3_moe", group)
            adamw(engine)
            if what == "layout":
                engine.apply(random_layout(engine.layout, Random(group.rank)))
            batch = own(0, 0)
            if group.rank == 1:
                del batch[0]["labels"]
            engine.step(batch)
        return True

    assert run_ranks(RANKS, work) == [True] * RANKS


def test_positions_matter_where_documents_begin_and_only_there() -> None:
    engine = engine_of("qwen3_moe")
    adamw(engine)
    (batch,) = micro_batches(rows_of(0), 7)
    plain = engine.evaluate([batch])
    positions = torch.arange(10).expand(7, 10)
    assert torch.equal(engine.evaluate([{**batch, "position_ids": positions}]), plain)
    restarted = engine.evaluate([{**batch, "position_ids": positions % 5}])
    assert not torch.equal(restarted, plain)


def few_slots(engine: Engine) -> None:
    layout = start_layout([4, 4], range(1))
    engine_of("qwen3_moe", layout=layout, num_slots=3)


def other_ranks(engine: Engine) -> None:
    engine.apply(start_layout([4, 4], range(2)))


def other_model(engine: Engine) -> None:
    engine.apply(start_layout([4, 0], range(1)))


def no_optimizer(engine: Engine) -> None:
    engine.step(own(0, 0))


def foreign_parameters(engine: Engine) -> None:
    engine.add_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))


def optimized_twice(engine: Engine) -> None:
    adamw(engine)
    adamw(engine)


def not_per_element(engine: Engine) -> None:
    engine.add_optimizer(torch.optim.Adafactor(engine.parameters()))


def two_micro_batches(engine: Engine) -> None:
    from pacekeeper.trainer.engine.routing import Balance

    balanced = engine_of("qwen3_moe", balance=Balance.BATCH, balance_weight=0.1)
    adamw(balanced)
    balanced.step(micro_batches(rows_of(0), 3))


def no_bias(engine: Engine) -> None:
    engine_of("qwen3_moe", bias_rate=0.001)


def an_unknown_balance(engine: Engine) -> None:
    engine_of("qwen3_moe", balance="all")


def half_precision(engine: Engine) -> None:
    engine_of("qwen3_moe", compute_dtype=torch.float16)


def no_such_device(engine: Engine) -> None:
    engine_of("qwen3_moe", device="tpu9")


def a_negative_norm(engine: Engine) -> None:
    engine_of("qwen3_moe", max_grad_norm=-1.0)


def only_experts_have_an_optimizer(engine: Engine) -> None:
    engine.add_optimizer(torch.optim.SGD(engine.expert_parameters()))
    engine.step(own(0, 0))


def no_process_group(engine: Engine) -> None:
    EngineGroups.from_torch(torch.device("cpu"))


@pytest.mark.parametrize(
    "attempt",
    [
        few_slots,
        other_ranks,
        other_model,
        no_optimizer,
        foreign_parameters,
        optimized_twice,
        not_per_element,
        two_micro_batches,
        no_bias,
        an_unknown_balance,
        half_precision,
        no_such_device,
        a_negative_norm,
        only_experts_have_an_optimizer,
        no_process_group,
    ],
)
def test_what_can_not_be_trained_is_rejected(attempt: Callable[[Engine], None]) -> None:
    with pytest.raises(ConfigError):
        attempt(engine_of("qwen3_moe"))


def test_rows_follow_the_shares_of_the_batch() -> None:
    def work(group: ThreadGroup) -> list[int]:
        layout = start_layout([4, 4], group.ranks)
        engine = engine_of("qwen3_moe", group, layout=with_shares(layout, 0.5, 0.0, 0.5))
        return list(engine.rows(6))

    assert run_ranks(RANKS, work) == [[0, 1, 2], [], [3, 4, 5]]


def test_weights_do_not_depend_on_the_layout() -> None:
    def work(group: ThreadGroup) -> dict[Any, torch.Tensor]:
        return {(n, e): t.clone() for n, e, t in held_tensors(engine_of("qwen3_moe", group))}

    whole = {(n, e): t for n, e, t in held_tensors(engine_of("qwen3_moe"))}
    found = run_ranks(RANKS, work)
    assert set().union(*found) == whole.keys()
    assert all(torch.equal(t, whole[key]) for held in found for key, t in held.items())


def test_a_config_may_be_a_folder(tmp_path: Any) -> None:
    import json

    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3_moe")))
    engine = Engine.from_config(tmp_path, seed=5, dtype=torch.float64)
    whole = {(n, e): t for n, e, t in held_tensors(engine_of("qwen3_moe"))}
    assert all(torch.equal(t, whole[n, e]) for n, e, t in held_tensors(engine))
