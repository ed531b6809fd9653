"""The probe reads the rank's own clock, faults included, and disturbs nothing of it."""

from dataclasses import dataclass, field

import pytest
import torch

from pacekeeper.core.config.train import TrainConfig
from pacekeeper.trainer.distributed import microbenchmark
from pacekeeper.trainer.distributed.collectives import LocalFabric
from pacekeeper.trainer.emulation.device import DeviceModel, EmulatedClock
from pacekeeper.trainer.hooks.compute_timers import CpuClock, DeviceEventClock
from pacekeeper.trainer.toy.model.flop_counter import NO_WORK, WorkMeter

CPU = torch.device("cpu")


def emulated(slowdown: float) -> tuple[EmulatedClock, WorkMeter]:
    meter = WorkMeter()
    device = DeviceModel.calibrated(TrainConfig(), 4)
    clock = EmulatedClock(meter=meter, device=device, jitter=0.0, seed=0, slowdown=slowdown)
    return clock, meter


@pytest.mark.parametrize("slowdown", [1.0, 1.6, 3.0])
def test_an_emulated_device_reads_its_fault(slowdown: float) -> None:
    reading = microbenchmark.run(LocalFabric(), *emulated(slowdown), CPU)
    assert reading is not None
    assert reading.gemm_s == pytest.approx(microbenchmark.EMULATED_S * slowdown)
    assert reading.copy_s == pytest.approx(microbenchmark.EMULATED_S * slowdown)
    assert reading.duration_s >= reading.gemm_s + reading.copy_s


def test_no_work_of_the_probe_is_left_in_the_meter_for_the_next_step() -> None:
    clock, meter = emulated(1.0)
    microbenchmark.run(LocalFabric(), clock, meter, CPU)
    assert meter.take() == NO_WORK


def test_a_very_slow_device_runs_each_kind_once_and_no_more() -> None:
    clock, meter = emulated(20.0)
    microbenchmark.run(LocalFabric(), clock, meter, CPU)
    assert clock.num_segments == 2
    healthy, meter = emulated(1.0)
    microbenchmark.run(LocalFabric(), healthy, meter, CPU)
    assert healthy.num_segments <= 2 * microbenchmark.REPEATS


def test_on_the_clock_of_a_thread_a_fault_burns_in_each_repeat() -> None:
    spent_s: list[float] = []
    reading = microbenchmark.run(LocalFabric(), CpuClock(burn=spent_s.append), WorkMeter(), CPU)
    assert reading is not None
    assert 2 <= len(spent_s) <= 2 * microbenchmark.REPEATS
    assert min(spent_s) > 0.0


@dataclass
class Event:
    """A device's event: each one recorded is so many milliseconds later."""

    times: list[float]
    at_ms: float = 0.0
    waits: list[int] = field(default_factory=list)

    def record(self) -> None:
        self.at_ms = self.times.pop(0)

    def synchronize(self) -> None:
        self.waits.append(1)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "Event") -> float:
        return other.at_ms - self.at_ms


def test_a_device_is_read_by_events_of_its_own_and_its_last_micro_batch_is_not_lost() -> None:
    times = [0.0, 7.0, *(float(ms) for ms in range(10, 70, 3)), 100.0, 110.0]
    burnt: list[float] = []
    clock = DeviceEventClock(lambda: Event(times), burn=lambda began: burnt.append(began.at_ms))
    clock.begin()
    clock.end()
    reading = microbenchmark.run(LocalFabric(), clock, WorkMeter(), CPU)
    assert reading is not None
    assert (reading.gemm_s, reading.copy_s) == pytest.approx((3e-3, 3e-3))
    assert 1 + 2 <= len(burnt) <= 1 + 2 * microbenchmark.REPEATS
    clock.begin()
    previous = clock.end()
    assert previous is not None
    assert previous.compute_s == pytest.approx(7e-3)


def test_a_device_without_room_gives_no_reading_but_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Counting(LocalFabric):
        sent = 0

        def exchange(self, values: object) -> torch.Tensor:
            self.sent += 1
            return torch.zeros(1, 1)

    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    fabric, clock = Counting(), emulated(1.0)
    monkeypatch.setattr(torch, "full", full)
    assert microbenchmark.run(fabric, *clock, CPU) is None
    assert fabric.sent == 1
