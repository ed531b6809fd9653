"""Clocks count compute and nothing else; the emulated device takes as long as its work."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.config.train import TrainConfig
from pacekeeper.trainer.emulation.device import Burner, DeviceModel, EmulatedClock, even_step_work
from pacekeeper.trainer.emulation.faults import (
    COMPUTE_FAULT,
    LINK_FAULT,
    FaultInjector,
    stop_duty_cycle,
)
from pacekeeper.trainer.hooks import compute_timers
from pacekeeper.trainer.hooks.compute_timers import CpuClock, WallClock
from pacekeeper.trainer.toy.model.flop_counter import OpCount, WorkMeter, WorkPass

DEVICE = DeviceModel(flops_per_s=1e3, bytes_per_s=1e3, kernel_s=1e-3)


def emulated(jitter: float = 0.0, slowdown: float = 1.0, seed: int = 1) -> EmulatedClock:
    return EmulatedClock(
        meter=WorkMeter(), device=DEVICE, jitter=jitter, seed=seed, slowdown=slowdown
    )


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6))
def test_backward_counts_twice_the_forward_work_of_each_segment(flops: list[float]) -> None:
    meter = WorkMeter()
    work = WorkPass(meter)
    boundaries = []
    for i, amount in enumerate(flops):
        work.add(OpCount(flops=amount))
        if i < len(flops) - 1:
            boundaries.append(work.boundary())
    assert meter.take().flops == pytest.approx(sum(flops))
    for i in reversed(boundaries):
        work.backward_boundary(i)
        assert meter.take().flops == pytest.approx(2 * flops[i + 1])
    work.finish_backward()
    assert meter.take().flops == pytest.approx(2 * flops[0])
    assert meter.take() == OpCount()


def test_the_emulated_device_waits_for_its_modelled_time_and_reports_it() -> None:
    clock = emulated()
    began_s = time.perf_counter()
    clock.begin()
    clock.meter.add(
        OpCount(flops=20.0, bytes=5.0, kernels=10)
    )  # 20 ms of compute, 10 ms of kernels
    clock.pause()
    assert time.perf_counter() - began_s >= 0.029
    clock.resume()
    measured = clock.end()
    assert measured is not None
    assert measured.compute_s == pytest.approx(0.030)


def test_micro_batches_that_take_turns_are_timed_apart() -> None:
    clock, found = emulated(), []
    turns: dict[str, object] = {}
    for name, kernels in (("first", 1), ("second", 4)):
        clock.begin()
        clock.meter.add(OpCount(kernels=kernels))
        turns[name] = clock.suspend()
    for name, kernels in (("first", 2), ("second", 6)):
        time.sleep(0.002)
        clock.resume_suspended(turns[name])
        clock.meter.add(OpCount(kernels=kernels))
        measured = clock.end()
        assert measured is not None
        found.append(measured.compute_s)
    assert found == pytest.approx([0.003, 0.010])


@pytest.mark.parametrize("clock", [WallClock(), CpuClock()], ids=["wall", "cpu"])
def test_what_others_compute_in_their_turns_is_not_a_micro_batchs_own(
    clock: WallClock | CpuClock,
) -> None:
    began_s = time.perf_counter()
    clock.begin()
    aside = clock.suspend()
    clock.begin()
    until_s = time.thread_time() + 0.05
    while time.thread_time() < until_s:
        pass
    other = clock.end()
    clock.resume_suspended(aside)
    own = clock.end()
    passed_s = time.perf_counter() - began_s
    assert own is not None and other is not None
    assert other.compute_s >= 0.049
    assert own.compute_s <= passed_s - other.compute_s


def test_a_fault_stretches_the_modelled_time() -> None:
    times = []
    for slowdown in (1.0, 1.6):
        clock = emulated(slowdown=slowdown)
        clock.begin()
        clock.meter.add(OpCount(kernels=5))
        measured = clock.end()
        assert measured is not None
        times.append(measured.compute_s)
    assert times[1] / times[0] == pytest.approx(1.6)


def test_jitter_is_seeded_and_keeps_the_mean() -> None:
    def run(seed: int) -> list[float]:
        clock = emulated(jitter=0.02, seed=seed)
        found = []
        for _ in range(50):
            clock.begin()
            clock.meter.add(OpCount(kernels=0.01))
            measured = clock.end()
            assert measured is not None
            found.append(measured.compute_s)
        return found

    assert run(1) == run(1) != run(2)
    assert sum(run(3)) / 50 == pytest.approx(1e-5, rel=0.02)


def test_real_arithmetic_that_takes_longer_is_counted_as_an_overrun() -> None:
    clock = emulated()
    clock.begin()
    clock.meter.add(OpCount(kernels=1))
    time.sleep(0.01)
    clock.pause()
    assert (clock.num_segments, clock.num_overruns) == (1, 1)
    assert 0.009 < clock.overrun_s < 5.0


@given(st.integers(1, 16), st.sampled_from([1, 2, 4]))
def test_an_even_step_takes_the_configured_time(world: int, micro_batches: int) -> None:
    config = replace(TrainConfig(), num_microbatches=micro_batches, emulated_step_s=0.5)
    device = DeviceModel.calibrated(config, world)
    assert device.time_s(even_step_work(config, world)) == pytest.approx(0.5, rel=0.02)


def test_a_narrow_model_bound_by_memory_takes_the_configured_time_too() -> None:
    config = replace(TrainConfig(), hidden_size=16, expert_hidden_size=1, emulated_step_s=0.5)
    work = even_step_work(config, 4)
    device = DeviceModel.calibrated(config, 4)
    assert work.bytes / device.bytes_per_s > work.flops / device.flops_per_s
    assert device.time_s(work) == pytest.approx(0.5)


def test_device_time_is_not_merely_proportional_to_tokens() -> None:
    device = DeviceModel.calibrated(TrainConfig(), 4)
    even = even_step_work(TrainConfig(), 4)
    kernels_s = even.kernels * device.kernel_s
    assert 0.10 <= kernels_s / TrainConfig().emulated_step_s <= 0.20
    half = OpCount(flops=even.flops / 2, bytes=even.bytes / 2, kernels=even.kernels)
    assert device.time_s(half) - kernels_s == pytest.approx((device.time_s(even) - kernels_s) / 2)


def test_the_wall_clock_leaves_waiting_out() -> None:
    clock = WallClock()
    began_s = time.perf_counter()
    clock.begin()
    clock.pause()
    time.sleep(0.05)
    clock.resume()
    measured = clock.end()
    passed_s = time.perf_counter() - began_s
    assert measured is not None and measured.wait_s is not None
    assert measured.wait_s >= 0.05
    assert measured.compute_s <= passed_s - measured.wait_s


def test_the_cpu_clock_sees_cpu_time_and_stalls_but_not_waiting() -> None:
    clock = CpuClock()
    clock.begin()
    until_s = time.thread_time() + 0.02
    while time.thread_time() < until_s:
        pass
    clock.pause()
    time.sleep(0.05)  # waiting for others
    clock.resume()
    time.sleep(0.03)  # frozen
    measured = clock.end()
    assert measured is not None and measured.cpu_s is not None and measured.wait_s is not None
    assert measured.cpu_s >= 0.02
    assert measured.wait_s >= 0.05
    if measured.stall_s is not None:
        assert measured.stall_s >= 0.02
        assert measured.compute_s == pytest.approx(measured.cpu_s + measured.stall_s)


@pytest.mark.parametrize("content", [None, "", "0 0 0", "1 2", "a b c"])
def test_without_run_queue_statistics_nothing_is_invented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    statistics = tmp_path / "schedstat"
    if content is not None:
        statistics.write_text(content)
    monkeypatch.setattr(compute_timers, "SCHEDSTAT", str(statistics))
    clock = CpuClock()
    clock.begin()
    clock.pause()
    clock.resume()
    measured = clock.end()
    assert measured is not None and measured.cpu_s is not None
    assert measured.run_queue_s is None and measured.stall_s is None
    assert measured.compute_s == measured.cpu_s


def test_time_on_the_run_queue_is_no_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = tmp_path / "schedstat"
    statistics.write_text("1000 500 1")
    monkeypatch.setattr(compute_timers, "SCHEDSTAT", str(statistics))
    clock = CpuClock()
    began_s = time.perf_counter()
    clock.begin()
    time.sleep(0.03)
    statistics.write_text("1000 20000500 1")  # 20 ms of it: a competitor had the core
    measured = clock.end()
    passed_s = time.perf_counter() - began_s
    assert measured is not None and measured.stall_s is not None and measured.cpu_s is not None
    assert measured.run_queue_s == pytest.approx(0.020)
    assert 0.0 < measured.stall_s <= passed_s - measured.cpu_s - 0.020


def test_burning_is_real_extra_compute() -> None:
    clock = CpuClock(burn=Burner(slowdown=3.0))
    clock.begin()
    began_s = time.thread_time()
    while time.thread_time() - began_s < 0.01:
        pass
    measured = clock.end()
    assert measured is not None and measured.cpu_s is not None
    assert measured.cpu_s >= 0.029


def test_the_injector_obeys_its_file_and_writes_the_truth(tmp_path: Path) -> None:
    target = Burner()
    injector = FaultInjector(directory=tmp_path, rank=2, targets={COMPUTE_FAULT: target})
    injector.begin_step(0)
    order = tmp_path / "rank-2.json"
    order.write_text("{")  # being written
    injector.begin_step(1)
    assert target.slowdown == 1.0
    fresh = tmp_path / "fresh"
    fresh.write_text(json.dumps({"slowdown": 1.6}))
    fresh.rename(order)
    injector.begin_step(2)
    injector.begin_step(3)
    assert target.slowdown == 1.6
    (line,) = (tmp_path / "truth.jsonl").read_text().splitlines()
    truth = json.loads(line)
    assert (truth["rank"], truth["step"], truth["slowdown"]) == (2, 2, 1.6)


def test_an_order_of_one_kind_lifts_the_others(tmp_path: Path) -> None:
    targets = {COMPUTE_FAULT: Burner(slowdown=2.0), LINK_FAULT: Burner()}
    (tmp_path / "rank-0.json").write_text('{"slowdown": 3.0, "kind": "link"}')
    FaultInjector(directory=tmp_path, rank=0, targets=targets).begin_step(0)
    assert {kind: target.slowdown for kind, target in targets.items()} == {
        COMPUTE_FAULT: 1.0,
        LINK_FAULT: 3.0,
    }
    assert json.loads((tmp_path / "truth.jsonl").read_text())["kind"] == LINK_FAULT


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("{}", "slowdown: expected a number"),
        ("[1.6]", "expected an object"),
        ('{"slowdown": "1.6"}', "slowdown: expected a number"),
        ('{"slowdown": true}', "slowdown: expected a number"),
        ('{"slowdown": NaN}', "finite"),
        ('{"slowdown": 0}', "above 0"),
        ('{"slowdown": -2}', "above 0"),
        ('{"slowdown": 1.6, "kind": "stop"}', "kind: expected one of ['compute']"),
    ],
)
def test_a_wrong_order_is_refused_once_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, order: str, expected: str
) -> None:
    target = Burner(slowdown=1.25)
    injector = FaultInjector(directory=tmp_path, rank=2, targets={COMPUTE_FAULT: target})
    (tmp_path / "rank-2.json").write_text(order)
    for step in range(3):
        injector.begin_step(step)
    assert target.slowdown == 1.25
    assert not (tmp_path / "truth.jsonl").exists()
    (record,) = caplog.records
    assert expected in record.message


def test_a_fault_that_can_not_be_written_down_does_not_act(tmp_path: Path) -> None:
    target = Burner()
    (tmp_path / "truth.jsonl").mkdir()
    (tmp_path / "rank-0.json").write_text('{"slowdown": 2.0}')
    FaultInjector(directory=tmp_path, rank=0, targets={COMPUTE_FAULT: target}).begin_step(0)
    assert target.slowdown == 1.0


def test_two_orders_within_one_tick_of_the_file_clock_both_count(tmp_path: Path) -> None:
    target = Burner()
    injector = FaultInjector(directory=tmp_path, rank=0, targets={COMPUTE_FAULT: target})
    order = tmp_path / "rank-0.json"
    for slowdown in (1.6, 1.0):
        fresh = tmp_path / f"fresh-{slowdown}"
        fresh.write_text(json.dumps({"slowdown": slowdown}))
        os.utime(fresh, ns=(1_000, 1_000))
        fresh.rename(order)
        injector.begin_step(0)
        assert target.slowdown == slowdown


def test_a_stopped_process_runs_again_afterwards() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        periods = iter([False] * 5 + [True])
        stop_duty_cycle(child.pid, duty=0.5, period_s=0.02, is_over=lambda: next(periods))
        state = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state != "T"
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    stop_duty_cycle(child.pid, duty=0.5, period_s=0.02, is_over=lambda: False)  # gone: ends at once
    with pytest.raises(ValueError, match="between 0 and 1"):
        stop_duty_cycle(1, duty=1.0, period_s=1.0, is_over=lambda: True)
