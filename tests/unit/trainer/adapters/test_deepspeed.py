"""DeepSpeed's adapter by the order of an engine's calls; tests/integration has the real engine."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from pacekeeper.core.telemetry.records import ExpertLoadRecord, MicroBatchRecord, StepRecord
from pacekeeper.trainer.adapters import deepspeed
from pacekeeper.trainer.adapters.deepspeed import EngineWatch
from pacekeeper.trainer.hooks.contexts import MicrobatchFeatures
from support.rings import records_in


class TopKGate(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.tensor([x.shape[0] - 1, 1])


class Experts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class MOELayer(nn.Module):
    """Two ranks, one expert each, a capacity as large as the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = TopKGate(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        self.gate(x)
        self.experts(x.expand(2, 1, *x.shape))
        return x


class Router(nn.Module):
    num_experts = 2

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        chosen = torch.zeros(len(x), 1, dtype=torch.int64)
        return x, chosen, torch.tensor([x.shape[0], 0], dtype=torch.int32)


class GroupedExperts(nn.Module):
    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return x


class AutoEPMoELayer(nn.Module):
    """As DeepSpeed's: its router counts, and its experts' rows are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(), GroupedExperts()
        self.tokens_per_expert: Tensor
        self.register_buffer("tokens_per_expert", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        counts = self.router(x)[2]
        self.tokens_per_expert.add_(counts)
        self.experts(torch.cat([x, x.new_zeros(8, 1)]), counts)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.moe: nn.Module = MOELayer()

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens.reshape(-1, 1).to(torch.float32)
        loss: Tensor = (self.moe(x) * self.weight).sum()
        return loss


class Engine:
    """The calls that DeepSpeedEngine makes, and their order."""

    def __init__(self, accumulates: int = 2) -> None:
        self.device = "cpu"
        self.module = Model()
        self.global_steps = self._micro_steps = 0
        self._accumulates = accumulates

    def __call__(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.module(tokens)
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self._backward_epilogue()

    def _backward_epilogue(self) -> None:
        pass

    def step(self) -> None:
        self._micro_steps += 1
        if self._micro_steps % self._accumulates == 0:
            self.global_steps += 1


class OlderEngine(Engine):
    """Before 0.18 an engine's backward was one method."""

    _backward_epilogue: Any = property()

    def backward(self, loss: Tensor) -> None:
        loss.backward()


class ForwardPass: ...


class BackwardPass: ...


class LoadMicroBatch: ...


class PipelineEngine(Engine):
    """Two stages; two micro-batches whose passes take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_stages, self.stage_id, self.mp_world_size = 2, 1, 4
        self.grid = SimpleNamespace(model_parallel_size=2)
        self.pipe_buffers: dict[str, list[Any]] = {"inputs": [None, None]}
        self.fails = False

    def _load(self, buffer_id: int) -> None:
        self.pipe_buffers["inputs"][buffer_id] = torch.zeros(1, 8 + buffer_id)

    def _pass(self, buffer_id: int) -> None:
        if self.fails:
            raise ConnectionError("a stage is gone")

    _INSTRUCTION_MAP: ClassVar = {LoadMicroBatch: _load, ForwardPass: _pass, BackwardPass: _pass}

    def train_batch(self) -> Tensor:
        for kind, buffer_id in (
            (LoadMicroBatch, 0), (ForwardPass, 0), (LoadMicroBatch, 1), (ForwardPass, 1),
            (BackwardPass, 0), (BackwardPass, 1),
        ):  # fmt: skip
            self._INSTRUCTION_MAP[kind](self, buffer_id=buffer_id)
        self.global_steps += 1
        return torch.tensor(2.5)

    def eval_batch(self) -> None:
        for kind in (LoadMicroBatch, ForwardPass):
            self._INSTRUCTION_MAP[kind](self, buffer_id=0)


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
