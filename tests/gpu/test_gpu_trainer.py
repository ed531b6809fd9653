"""Our trainer on a real CUDA device: the same losses as on the CPU, and times by its events.

Skips itself where there is no device; ranks share it where there is only one.
"""

import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pacekeeper.agent.rings.collector import RingCollector
from pacekeeper.core.telemetry.attachment import Attachment, Clock
from pacekeeper.core.telemetry.records import MicroBatchRecord
from pacekeeper.trainer.distributed.device import DeviceBurner, new_event
from pacekeeper.trainer.hooks.compute_timers import DeviceEventClock
from pacekeeper.trainer.toy.engine.single_process import train_alone
from support.fleet import SMALL, Fleet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ON_DEVICE = replace(SMALL, clock="device")


def assert_as_on_the_cpu(fleet: Fleet, rank: int) -> None:
    wanted = [loss for _, loss, _ in train_alone(replace(SMALL, steps=fleet.config.steps))]
    assert [line["loss"] for line in fleet.steps(rank)] == pytest.approx(wanted, rel=1e-7)


def seen(fleet: Fleet) -> tuple[list[Attachment], list[MicroBatchRecord]]:
    """What the agent of the first node reads."""
    (reading,) = RingCollector(directory=fleet.ring_dir(0)).poll(time.monotonic())
    return list(reading.attached), [r for r in reading.records if isinstance(r, MicroBatchRecord)]


def test_ranks_on_the_device_train_as_one_process_on_the_cpu_does(tmp_path: Path) -> None:
    with Fleet(
        directory=tmp_path, config=ON_DEVICE, ranks_per_node=2, has_own_server=True
    ) as fleet:
        assert fleet.codes() == [0]
        for rank in (0, 1):
            assert_as_on_the_cpu(fleet, rank)
        attached, times = seen(fleet)
    assert {a.clock for a in attached} == {Clock.CUDA}
    assert all(a.device_uuid.startswith("GPU-") for a in attached)
    assert times and all(record.compute_s > 0.0 for record in times)


def test_survivors_on_the_device_go_on_in_the_same_step(tmp_path: Path) -> None:
    with Fleet(
        directory=tmp_path, config=ON_DEVICE, ranks_per_node=3, has_own_server=True
    ) as fleet:
        fleet.await_step(5, 0)
        fleet.signal(1, signal.SIGKILL)
        assert fleet.codes() == [0]
        for rank in (0, 2):
            assert_as_on_the_cpu(fleet, rank)


def test_a_fault_makes_the_devices_own_times_longer() -> None:
    burner = DeviceBurner(device=torch.device("cuda", 0))
    clock = DeviceEventClock(new_event, burn=burner)
    matrix = torch.randn(2048, 2048, device="cuda")

    def measured() -> float:
        found = []
        for _ in range(5):
            clock.begin()
            for _ in range(20):
                torch.mm(matrix, matrix)
            compute = clock.end()
            torch.cuda.synchronize()
            if compute is not None:
                found.append(compute.compute_s)
        return min(found[1:])

    healthy_s = measured()
    burner.slowdown = 3.0
    assert measured() / healthy_s == pytest.approx(3.0, rel=0.3)
