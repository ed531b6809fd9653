"""On a real CUDA device: event times against the wall clock, and NVML's own account of it.

Skips itself where there is no device; nothing here changes a setting of the device.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pacekeeper.agent.nvml.client import Nvml, open_nvml
from pacekeeper.trainer.hooks.compute_timers import ComputeTime, DeviceEventClock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def new_event() -> Any:
    return torch.cuda.Event(enable_timing=True)


def measure(work: Callable[[], None], rounds: int = 5) -> list[ComputeTime]:
    clock, found = DeviceEventClock(new_event), []
    for _ in range(rounds):
        clock.begin()
        work()
        measured = clock.end()
        torch.cuda.synchronize()  # so that the next round finds this one finished
        if measured is not None:
            found.append(measured)
    return found


def test_event_times_agree_with_a_synchronised_stopwatch() -> None:
    matrix = torch.randn(4096, 4096, device="cuda")

    def work() -> None:
        for _ in range(10):
            torch.mm(matrix, matrix)

    work()
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    work()
    torch.cuda.synchronize()
    wall_s = time.perf_counter() - began_s
    for measured in measure(work):
        assert measured.is_of_previous
        assert measured.compute_s == pytest.approx(wall_s, rel=0.5)


def test_twice_the_work_takes_about_twice_as_long() -> None:
    matrix = torch.randn(4096, 4096, device="cuda")

    def work(times: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(times):
                torch.mm(matrix, matrix)

        return run

    once = min(m.compute_s for m in measure(work(10)))
    twice = min(m.compute_s for m in measure(work(20)))
    assert twice / once == pytest.approx(2.0, rel=0.2)


def test_nvml_names_this_process_as_a_user_of_the_device() -> None:
    torch.ones(1, device="cuda").sum().item()
    nvml = open_nvml()
    assert isinstance(nvml, Nvml)
    samples = nvml.sample(time.monotonic())
    nvml.close()
    assert samples
    assert any(sample.sm_clock_mhz for sample in samples)
    assert any(sample.processes for sample in samples)
