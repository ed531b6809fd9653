"""The emulated device of an engine: every kernel once, in its segment, at the stated speed."""

from pathlib import Path
from typing import Any

import pytest

from pacekeeper.core.kernel_laws.kernels import Kernel, Product, backward
from pacekeeper.core.kernel_laws.laws import time_s
from pacekeeper.core.kernel_laws.noise import DEVICE_NOISE, NO_NOISE
from pacekeeper.core.telemetry.attachment import Clock
from pacekeeper.core.telemetry.records import MicroBatchRecord
from pacekeeper.trainer.emulation import engine_device
from pacekeeper.trainer.emulation.engine_device import EmulatedWork, EngineDevice
from pacekeeper.trainer.emulation.model_kernels import model_kernels
from pacekeeper.trainer.engine.engine import Engine
from pacekeeper.trainer.hooks import compute_timers, hooks
from pacekeeper.trainer.parallel import experts
from pacekeeper.trainer.parallel.dispatch_plan import plan_dispatch
from support.engines import TOKENS, adamw, engine_of, micro_batches, rows_of
from support.rank_threads import ThreadGroup, run_ranks
from support.rings import records_in

EVEN = EmulatedWork(
    step_s=0.06,
    row_tokens=10 * TOKENS,
    rows_per_microbatch=3,
    num_microbatches=1,
    experts_per_token=2,
    exchanged_bytes=0.0,
    slots=4,
)


class FakeTime:
    """Time that passes only where something waits for it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        patch.setattr(engine_device, "time", self)
        patch.setattr(engine_device, "wait_until", self.wait_until)
        patch.setattr(compute_timers, "time", self)

    def perf_counter(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s

    def wait_until(self, due_s: float) -> None:
        self.now_s = max(self.now_s, due_s)


class Run:
    """An engine with an emulated device, and what it reported."""

    def __init__(
        self,
        folder: Path,
        device: EngineDevice,
        group: ThreadGroup | None = None,
        even: EmulatedWork = EVEN,
        family: str = "qwen3_moe",
        **options: Any,
    ) -> None:
        rank, size = (group.rank, len(group.ranks)) if group else (0, 1)
        self.hooks = hooks.attach(
            job="j",
            rank=rank,
            world_size=size,
            ring_dir=str(folder),
            clock=Clock.EMULATED,
            timer=device,
        )
        self.engine: Engine = engine_of(family, group, hooks=self.hooks, **options)
        self.device = device
        device.watch(self.engine.skeleton, self.engine.skeleton, TOKENS, even)
        adamw(self.engine)

    def records(self) -> list[MicroBatchRecord]:
        self.hooks.detach()
        assert self.hooks.ring.path is not None
        found = records_in(Path(self.hooks.ring.path))
        return [one for one in found if isinstance(one, MicroBatchRecord)]


def quiet(seed: int = 0) -> EngineDevice:
    return EngineDevice.seeded(seed, NO_NOISE)


def seconds(kernels: list[Kernel]) -> float:
    return sum(map(time_s, kernels))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("repeats", [False, True])
def test_a_micro_batch_is_all_its_kernels_forward_and_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, repeats: bool
) -> None:
    FakeTime(monkeypatch)
    run = Run(tmp_path, quiet(), family=family, checkpoint_activations=repeats)
    routed = run.engine.step(micro_batches(rows_of(0), 7)).routed
    skeleton = run.engine.skeleton
    kernels = model_kernels(skeleton, skeleton)
    lengths = (10 * TOKENS,) * 7
    inside, outside, constant = list[Kernel](), list[Kernel](), list[Kernel]()
    for name, one in kernels.modules.items():
        part = inside if name.startswith(f"{skeleton.layers}.") else outside
        if "rotary" in name:
            part = constant  # it has no backward pass
        part += one.forward(lengths)
    for layer in skeleton.experts:
        if layer is not None:
            slots = run.engine.store.slots[layer.layer]
            rows = [0] * run.engine.store.num_slots
            for expert, count in enumerate(routed[layer.layer].tolist()):
                rows[slots[expert]] = 10 * count
            inside += kernels.experts[layer.name].forward(rows)
    expected_s = seconds(inside + outside + constant)
    expected_s += seconds([one for kernel in inside + outside for one in backward(kernel)])
    if repeats:
        expected_s += seconds(inside)
    (record,) = run.records()
    scale = EVEN.step_s / EVEN.kernels_s(kernels)
    assert record.compute_s == pytest.approx(scale * expected_s, rel=1e-9)
    assert run.device.num_overruns == 0


def test_an_even_step_takes_the_given_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeTime(monkeypatch)
    run = Run(tmp_path, quiet())
    run.engine.step(micro_batches(rows_of(0, 3), 3))
    (record,) = run.records()
    assert record.compute_s == pytest.approx(EVEN.step_s, rel=0.1)


def test_planning_on_the_host_is_not_device_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeTime(monkeypatch)
    times = []
    for planning_s in (0.0, 7.0):

        def slow(*given: Any, seconds: float = planning_s) -> Any:
            clock.now_s += seconds
            return plan_dispatch(*given)

        monkeypatch.setattr(experts, "plan_dispatch", slow)
        run = Run(tmp_path / str(planning_s), quiet())
        run.engine.step(micro_batches(rows_of(0), 7))
        (record,) = run.records()
        assert run.device.num_overruns == 0
        times.append((record.compute_s, record.wait_s))
    (compute_s, _), (again_s, wait_s) = times
    assert again_s == compute_s
    assert wait_s == pytest.approx(2 * 7.0), "of two layers"


def test_arithmetic_that_takes_longer_than_the_device_is_an_overrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeTime(monkeypatch)
    run = Run(tmp_path, quiet())
    times = []
    for late_s in (0.0, 3.0):
        handle = run.engine.model.get_submodule("lm_head").register_forward_hook(
            lambda *_, s=late_s: setattr(clock, "now_s", clock.now_s + s)
        )
        run.engine.step(micro_batches(rows_of(0), 7))
        handle.remove()
        times.append(run.device.overrun_s)
    assert times[0] == 0.0 and 2.9 < times[1] < 3.0
    assert run.device.num_overruns == 1
    first, second = run.records()
    assert second.compute_s == pytest.approx(first.compute_s, rel=0.1)


def test_an_evaluation_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime(monkeypatch)
    run = Run(tmp_path, quiet())
    began_s = clock.now_s
    run.engine.evaluate(micro_batches(rows_of(0), 7))
    assert (clock.now_s, run.device.num_segments) == (began_s, 0)
    run.engine.step(micro_batches(rows_of(0, 3), 3))
    (record,) = run.records()
    assert record.compute_s == pytest.approx(EVEN.step_s, rel=0.1)


def test_a_backward_pass_counts_after_another_micro_batch_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeTime(monkeypatch)
    device = quiet()
    device.begin()
    device.add_time(0.2)
    first_forward = device.suspend()
    device.begin()
    device.add_time(0.3)
    second = device.end()
    device.resume_suspended(first_forward)
    device.add_time(0.4)
    first = device.end()
    assert first is not None and second is not None
    assert [first.compute_s, second.compute_s] == pytest.approx([0.6, 0.3])


def test_documents_of_a_row_attend_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeTime(monkeypatch)
    even = EmulatedWork(
        step_s=0.06,
        row_tokens=1000 * TOKENS,  # most of the time is attention
        rows_per_microbatch=3,
        num_microbatches=1,
        experts_per_token=2,
        exchanged_bytes=0.0,
        slots=4,
    )
    run = Run(tmp_path, quiet(), even=even)
    (batch,) = micro_batches(rows_of(0, 3), 3)
    run.engine.step([batch])
    positions = (batch["input_ids"] * 0 + 1).cumsum(1) - 1
    positions[:, TOKENS // 2 :] -= TOKENS // 2
    run.engine.step([{**batch, "position_ids": positions}])
    whole, halves = run.records()
    assert (whole.num_documents, halves.num_documents) == (3, 6)
    assert halves.compute_s < 0.8 * whole.compute_s


def test_noise_is_that_of_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeTime(monkeypatch)
    found = []
    for number, seed in enumerate((1, 1, 2)):
        run = Run(tmp_path / str(number), EngineDevice.seeded(seed, DEVICE_NOISE))
        for step in range(3):
            run.engine.step(micro_batches(rows_of(step), 4))
        found.append([record.compute_s for record in run.records()])
    assert found[0] == found[1] != found[2]


def test_a_slowed_rank_reports_it_and_the_other_waits(tmp_path: Path) -> None:
    def work(group: ThreadGroup) -> tuple[list[MicroBatchRecord], Clock]:
        device = quiet()
        run = Run(tmp_path, device, group, checkpoint_activations=True)
        for step in range(2):
            device.slowdown = 1.6 if step and group.rank else 1.0
            run.engine.step(micro_batches(rows_of(0)[3 * group.rank :][:3], 3))
        return run.records(), Clock.EMULATED

    (fast, _), (slow, _) = run_ranks(2, work)
    # AdamW changes the routing a little from step to step.
    assert slow[1].compute_s / slow[0].compute_s == pytest.approx(1.6, rel=0.02)
    assert fast[1].compute_s / fast[0].compute_s == pytest.approx(1.0, rel=0.02)
    behind_s = slow[1].compute_s - fast[1].compute_s
    assert fast[1].wait_s is not None and fast[1].wait_s > 0.3 * behind_s > 0.0


def test_a_rank_without_rows_computes_those_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = set[int]()

    def watched(kernel: Kernel) -> float:
        if isinstance(kernel, Product) and (kernel.inputs, kernel.outputs) == (64, 96):  # the head
            tokens.add(kernel.rows)
        return time_s(kernel)

    monkeypatch.setattr(engine_device, "time_s", watched)

    def work(group: ThreadGroup) -> list[MicroBatchRecord]:
        run = Run(tmp_path, quiet(), group)
        run.engine.step(micro_batches(rows_of(0)[: 3 * (1 - group.rank)], 3))
        return run.records()

    (busy,), (idle,) = run_ranks(2, work)
    assert (busy.tokens, idle.tokens) == (3 * TOKENS, 0)
    assert idle.expert_rows > 0 and 0.0 < idle.compute_s < busy.compute_s
    # The placeholder of the idle rank stands for no more than itself.
    assert {1, 3 * 10 * TOKENS} <= tokens and 10 not in tokens
