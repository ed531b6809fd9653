"""DeepSpeed's adapter by the order of an engine's calls; tests/integration has the real engine."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from pacekeeper.core.telemetry.records import ExpertLoadRecord, MicroBatchRecord, StepRecord
from pacekeeper.trainer.adapters import deepspeed
from pacekeeper.trainer.adapters.deepspeed import EngineWatch
from pacekeeper.trainer.hooks.contexts import MicrobatchFeatures
from support.deepspeed_calls import (
    AutoEPMoELayer,
    Engine,
    OlderEngine,
    PipelineEngine,
)
from support.rings import records_in


def told(watch: EngineWatch, kind: type[Any]) -> list[Any]:
    ring = watch.reporter.pace.ring
    assert ring.num_errors == 0, ring.reason
    assert ring.path is not None
    return [record for record in records_in(ring.path) if isinstance(record, kind)]


@pytest.fixture
def watched(tmp_path: Path) -> Callable[[Any], EngineWatch]:
    return lambda engine: deepspeed.watch(engine, job="job", ring_dir=str(tmp_path))


def train(engine: Engine, *lengths: int) -> None:
    for length in lengths:
        engine.backward(engine(torch.zeros(1, length)))
        engine.step()


@pytest.mark.parametrize("kind", [Engine, OlderEngine])
def test_micro_batches_belong_to_the_step_of_their_accumulation(
    watched: Callable[[Any], EngineWatch], kind: type[Engine]
) -> None:
    engine = kind()
    if kind is OlderEngine:
        assert not hasattr(engine, "_backward_epilogue")
    watch = watched(engine)
    train(engine, 4, 6, 8, 10)
    found = [(r.step, r.micro_batch, r.tokens) for r in told(watch, MicroBatchRecord)]
    assert found == [(0, 0, 4), (0, 1, 6), (1, 0, 8), (1, 1, 10)]
    assert [r.step for r in told(watch, StepRecord)] == [0, 1]
    loads = told(watch, ExpertLoadRecord)
    assert [(r.step, r.layer, r.counts) for r in loads] == [(0, 0, (8, 2)), (1, 0, (16, 2))]
    rows = [(r.expert_rows, r.num_active_experts) for r in told(watch, MicroBatchRecord)]
    assert rows == [(8, 1), (12, 1), (16, 1), (20, 1)]


def test_a_resumed_job_goes_on_with_its_own_numbers(
    watched: Callable[[Any], EngineWatch],
) -> None:
    engine = Engine(accumulates=1)
    watch = watched(engine)
    engine.global_steps = 500  # load_checkpoint
    train(engine, 4)
    assert [r.step for r in told(watch, StepRecord)] == [500]


def test_evaluations_are_not_told_wherever_they_lie(
    watched: Callable[[Any], EngineWatch],
) -> None:
    engine = Engine()
    watch = watched(engine)
    train(engine, 4)
    engine.module.eval()
    engine(torch.zeros(1, 99))
    engine.module.train()
    with torch.no_grad():
        engine(torch.zeros(1, 99))
    train(engine, 6)
    assert [r.tokens for r in told(watch, MicroBatchRecord)] == [4, 6]
    assert [r.counts for r in told(watch, ExpertLoadRecord)] == [(8, 2)]


def test_a_backward_that_the_engine_is_not_asked_for_ends_a_micro_batch_too(
    watched: Callable[[Any], EngineWatch],
) -> None:
    engine = Engine(accumulates=1)
    watch = watched(engine)
    loss = engine(torch.zeros(1, 4))
    loss.backward()
    engine._backward_epilogue()  # its hook calls it
    engine.step()
    assert len(told(watch, MicroBatchRecord)) == 1


def test_stages_tell_passes_that_take_turns(watched: Callable[[Any], EngineWatch]) -> None:
    engine = PipelineEngine()
    watch = watched(engine)
    assert engine.train_batch().item() == 2.5
    engine.eval_batch()
    batches = told(watch, MicroBatchRecord)
    assert [(r.step, r.micro_batch, r.tokens) for r in batches] == [(0, 0, 8), (0, 1, 9)]
    assert {r.tensor_share for r in batches} == {0.25}
    (step,) = told(watch, StepRecord)
    assert (step.step, step.loss) == (0, 2.5)
    assert step.input_wait_s is not None


def test_a_step_that_raises_is_not_told_and_its_error_is_the_trainers(
    watched: Callable[[Any], EngineWatch],
) -> None:
    engine = PipelineEngine()
    watch = watched(engine)
    engine.fails = True
    with pytest.raises(ConnectionError):
        engine.train_batch()
    engine.fails = False
    engine.train_batch()
    assert len(told(watch, StepRecord)) == 1
    assert [r.tokens for r in told(watch, MicroBatchRecord)] == [8, 9]  # nothing of the first try


def test_what_goes_wrong_in_here_is_no_matter_of_the_training(tmp_path: Path) -> None:
    engine = Engine(accumulates=1)

    def broken(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> MicrobatchFeatures:
        raise RuntimeError("what is this?")

    watch = deepspeed.watch(engine, job="job", ring_dir=str(tmp_path), work_of=broken)
    train(engine, 4)
    assert watch.reporter.pace.ring.num_errors > 0
    assert engine.global_steps == 1


def test_closed_the_engine_is_as_it_was(watched: Callable[[Any], EngineWatch]) -> None:
    for engine in (Engine(), PipelineEngine()):
        before = dict(vars(engine))
        watch = watched(engine)
        assert vars(engine) != before
        watch.close()
        assert vars(engine) == before
        assert not any(m._forward_pre_hooks for m in engine.module.modules())
        assert not any(m._forward_hooks for m in engine.module.modules())


@pytest.mark.parametrize("has_experts", [False, True])
def test_a_compiled_engine_stays_one_graph_and_hidden_experts_accuse_nobody(
    tmp_path: Path, has_experts: bool
) -> None:
    """As `engine.compile()` does: rows are not seen, and so no passes are told."""
    torch._dynamo.reset()
    graphs: Any = CompileCounter()
    engine = Engine(accumulates=1)
    if not has_experts:
        engine.module.moe = nn.Identity()
    engine.module.compile(backend=graphs, fullgraph=True)
    watch = deepspeed.watch(engine, job="j", ring_dir=str(tmp_path))
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 3)))
        engine.step()
    watch.close()
    assert watch.reporter.pace.ring.path is not None
    records = records_in(watch.reporter.pace.ring.path)
    assert [r.step for r in records if isinstance(r, StepRecord)] == [0, 1]
    told = [r.tokens for r in records if isinstance(r, MicroBatchRecord)]
    assert told == ([] if has_experts else [6, 6])
    assert graphs.frame_count == 1
    assert watch.reporter.pace.ring.num_errors == 0


def test_auto_ep_layers_tell_loads_and_rows_without_padding(
    watched: Callable[[Any], EngineWatch],
) -> None:
    engine = Engine()
    engine.module.moe = AutoEPMoELayer()
    watch = watched(engine)
    train(engine, 4, 6)
    assert [r.expert_rows for r in told(watch, MicroBatchRecord)] == [4, 6]
    assert [(r.step, r.counts) for r in told(watch, ExpertLoadRecord)] == [(0, (10, 0))]


def test_a_compiled_auto_ep_engine_tells_loads_from_its_own_counters(tmp_path: Path) -> None:
    torch._dynamo.reset()
    engine = Engine()
    engine.module.moe = AutoEPMoELayer()
    engine.module.compile(backend="eager", dynamic=True)
    train(engine, 3)  # before the attachment
    train(engine, 3)
    watch = deepspeed.watch(engine, job="j", ring_dir=str(tmp_path))
    train(engine, 4, 6, 8, 8)
    loads = told(watch, ExpertLoadRecord)
    assert [(r.step, r.counts) for r in loads] == [(1, (10, 0)), (2, (16, 0))]
    assert told(watch, MicroBatchRecord) == []
