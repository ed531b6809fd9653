"""Megatron's adapter by the order of a schedule's calls; tests/integration has the real classes."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pacekeeper.core.telemetry.records import ExpertLoadRecord, MicroBatchRecord, StepRecord
from pacekeeper.trainer.adapters import megatron
from pacekeeper.trainer.adapters.megatron import ScheduleWatch
from support.megatron_calls import Chunk, Wrapper, forward_step, run
from support.rings import records_in

LM = "megatron.training.global_vars"


class Timer:
    def __init__(self, heard: list[str], name: str) -> None:
        self._heard, self._name = heard, name

    def start(self, barrier: bool = False) -> None:
        self._heard.append(f"start {self._name} {barrier}")

    def stop(self, barrier: bool = False) -> None:
        self._heard.append(f"stop {self._name}")

    def elapsed(self) -> float:
        return 7.0


class Timers:
    """Megatron's own, which log."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        return Timer(self.heard, name)

    def log(self, names: list[str]) -> str:
        return ",".join(names)


class Job:
    """A rank's model, its optimizer, and what is told of them."""

    def __init__(self, directory: Path, *, timers: Timers | None = None, chunks: int = 1) -> None:
        self.directory = directory
        self.timers = timers
        self.config = SimpleNamespace(timers=timers, virtual_pipeline_model_parallel_size=None)
        self.chunks: list[Any] = [Wrapper(Chunk(self.config)) for _ in range(chunks)]
        self.optimizer = SimpleNamespace()
        self.optimizer.step = self.stepped = lambda: None
        self.watch: ScheduleWatch | None = None

    def watched(self, **more: Any) -> "Job":
        more = {"optimizer": self.optimizer, **more}
        self.watch = megatron.watch(self.chunks, job="job", ring_dir=str(self.directory), **more)
        return self

    def batches(self, *lengths: int) -> Iterator[Tensor]:
        return iter([torch.zeros(1, n) for n in lengths])

    def told(self, kind: type[Any]) -> list[Any]:
        assert self.watch is not None
        ring = self.watch.reporter.pace.ring
        assert ring.num_errors == 0, ring.reason
        assert ring.path is not None
        return [record for record in records_in(ring.path) if isinstance(record, kind)]


def test_micro_batches_are_told_in_the_order_of_their_forwards(tmp_path: Path) -> None:
    job = Job(tmp_path).watched(first_step=10)
    for _ in range(2):
        run(job.chunks, "F0F0B0F0B0B0", job.batches(4, 6, 8))
        job.optimizer.step()
    batches = job.told(MicroBatchRecord)
    assert [(r.step, r.micro_batch, r.tokens) for r in batches] == [
        (10 + step, number, 4 + 2 * number) for step in range(2) for number in range(3)
    ]
    assert [(r.expert_rows, r.num_active_experts) for r in batches[:3]] == [(4, 2), (6, 2), (8, 2)]
    assert [r.step for r in job.told(StepRecord)] == [10, 11]
    loads = job.told(ExpertLoadRecord)
    assert [(r.step, r.layer, r.counts) for r in loads] == [
        (10, 3, (0, 18, 0)),
        (11, 3, (0, 18, 0)),
    ]


def test_a_step_lasts_until_the_optimizer_has_stepped(tmp_path: Path) -> None:
    job = Job(tmp_path).watched()
    run(job.chunks, "F0B0", job.batches(4))
    assert job.told(StepRecord) == []
    job.optimizer.step()
    assert len(job.told(StepRecord)) == 1


def test_without_an_optimizer_it_lasts_as_long_as_its_passes(tmp_path: Path) -> None:
    job = Job(tmp_path).watched(optimizer=None)
    run(job.chunks, "F0B0", job.batches(4))
    job.chunks[0].eval()
    with torch.no_grad():
        run(job.chunks, "F0", job.batches(99), forward_only=True)
    assert [r.step for r in job.told(StepRecord)] == [0]


def test_evaluations_are_not_told(tmp_path: Path) -> None:
    job = Job(tmp_path).watched()
    run(job.chunks, "F0B0", job.batches(4))
    job.optimizer.step()
    job.chunks[0].eval()
    assert job.watch is not None
    with torch.no_grad():
        run(job.chunks, "F0F0", job.watch.fed(job.batches(99, 99)), forward_only=True)
    assert job.watch.reporter.pace.input_s is None  # nor what it waited for
    job.chunks[0].train()
    run(job.chunks, "F0B0", job.watch.fed(job.batches(6)))
    job.optimizer.step()
    assert [r.tokens for r in job.told(MicroBatchRecord)] == [4, 6]
    assert [sum(r.counts) for r in job.told(ExpertLoadRecord)] == [4, 6]


def test_a_step_that_is_run_again_before_its_end_is_told_once(tmp_path: Path) -> None:
    job = Job(tmp_path).watched()
    run(job.chunks, "F0B0F0B0", job.batches(4, 4))
    run(job.chunks, "F0B0F0B0", job.batches(4, 4))  # to see whether it gives the same
    job.optimizer.step()
    last = {(r.step, r.micro_batch): r for r in job.told(MicroBatchRecord)}
    assert sorted(last) == [(0, 0), (0, 1)]
    assert [r.counts for r in job.told(ExpertLoadRecord)] == [(0, 8, 0)]


def test_virtual_stages_tell_one_record_of_a_step(tmp_path: Path) -> None:
    job = Job(tmp_path, chunks=2).watched()
    run(job.chunks, "F0F0F1F1B1B1B0B0", job.batches(4, 6, 4, 6))
    job.optimizer.step()
    (batch,) = job.told(MicroBatchRecord)
    assert (batch.tokens, batch.expert_rows) == (10, 20)


def test_timers_that_were_there_are_called_as_ever(tmp_path: Path) -> None:
    timers = Timers()
    job = Job(tmp_path, timers=timers).watched()
    run(job.chunks, "F0B0", job.batches(4))
    assert timers.heard == [
        "start forward-backward True",
        "start forward-compute False",
        "stop forward-compute",
        "start backward-compute False",
        "stop backward-compute",
        "stop forward-backward",
    ]
    assert job.config.timers("interval-time").elapsed() == 7.0
    assert job.config.timers("forward-compute").elapsed() == 7.0
    assert job.config.timers.log(["a", "b"]) == "a,b"


def test_closed_everything_is_as_it_was(tmp_path: Path) -> None:
    for timers in (None, Timers()):
        job = Job(tmp_path, timers=timers).watched()
        assert job.watch is not None
        assert job.optimizer.step is not job.stepped
        job.watch.close()
        assert job.config.timers is timers
        assert job.optimizer.step is job.stepped  # what a learning-rate scheduler put there
        assert not any(m._forward_pre_hooks for m in job.chunks[0].modules())
        assert not any(m._forward_hooks for m in job.chunks[0].modules())


@pytest.fixture
def megatron_lm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron-LM, which has its timers and its arguments in a module."""
    module: Any = ModuleType(LM)
    module._GLOBAL_TIMERS = Timers()
    module._GLOBAL_ARGS = SimpleNamespace(curr_iteration=0)
    monkeypatch.setitem(sys.modules, LM, module)
    return module


def train_lm(job: Job, module: Any, step: Callable[..., Any], iterations: range) -> None:
    """As its loop does, with an evaluation after the second of them."""
    job.config.timers = module._GLOBAL_TIMERS
    for iteration in iterations:
        module._GLOBAL_ARGS.curr_iteration = iteration
        run(job.chunks, "F0B0", job.batches(4), step=step)
        module._GLOBAL_TIMERS("optimizer", log_level=1).start()
        module._GLOBAL_TIMERS("optimizer").stop()
        if iteration == iterations[1]:
            job.chunks[0].eval()
            job.config.timers = None
            with torch.no_grad():
                run(job.chunks, "F0", job.batches(99), step=step, forward_only=True)
            job.config.timers = module._GLOBAL_TIMERS
            job.chunks[0].train()


def test_megatron_lms_steps_carry_its_iterations(
    tmp_path: Path, megatron_lm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, made = Job(tmp_path), list[ScheduleWatch]()
    plain = megatron.watch

    def watch(*args: Any, **kwargs: Any) -> ScheduleWatch:
        made.append(plain(*args, **kwargs))
        return made[0]

    monkeypatch.setattr(megatron, "watch", watch)
    step = megatron.watched(forward_step, job="job", ring_dir=str(tmp_path))
    train_lm(job, megatron_lm, step, range(500, 505))
    (job.watch,) = made
    assert [r.step for r in job.told(StepRecord)] == [501, 502, 503, 504]
    assert [(r.step, r.tokens) for r in job.told(MicroBatchRecord)] == [
        (n, 4) for n in (501, 502, 503, 504)
    ]
    assert all(r.input_wait_s is not None for r in job.told(StepRecord))


def test_attached_in_an_evaluation_it_does_not_take_the_timers_away(
    tmp_path: Path, megatron_lm: Any
) -> None:
    job = Job(tmp_path)
    job.watched(optimizer=None)
    assert job.config.timers is None
    assert megatron_lm._GLOBAL_TIMERS("interval-time").elapsed() == 7.0


def test_of_packed_sequences_the_squares_are_untold(tmp_path: Path) -> None:
    def packed(batches: Iterator[Tensor], model: Any) -> Tensor:
        loss: Tensor = model(next(batches), packed_seq_params=object())
        return loss

    job = Job(tmp_path).watched()
    run(job.chunks, "F0B0", job.batches(6), step=packed)
    job.optimizer.step()
    (batch,) = job.told(MicroBatchRecord)
    assert (batch.tokens, batch.sum_len_squared, batch.num_documents) == (6, 0, 0)
