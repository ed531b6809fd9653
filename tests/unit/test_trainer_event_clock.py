"""The clock of device events never waits, and loses nothing of a host that runs ahead."""

from pathlib import Path
from typing import Any

import pytest

from pacekeeper.core.records import MicroBatchRecord
from pacekeeper.trainer import hooks
from pacekeeper.trainer.timing import MAX_LATE, DeviceEventClock
from support.rings import records_in


class FakeEvent:
    """Stands for a device event: finished when told, 3 ms between any two."""

    finished = True

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return FakeEvent.finished

    def elapsed_time(self, other: Any) -> float:
        return 3.0


def test_device_events_are_read_one_micro_batch_late_and_never_waited_for() -> None:
    clock = DeviceEventClock(FakeEvent)
    answers = []
    for finished in (True, True, False, True):
        FakeEvent.finished = finished
        clock.begin()
        clock.pause()
        clock.resume()
        answers.append(clock.end())
    first, second, third, fourth = answers
    assert first is None and third is None
    assert second is not None and second.is_of_previous
    assert second.compute_s == pytest.approx(0.006)
    assert fourth is not None and (fourth.lag, [each.lag for each in fourth.more]) == (2, [1])
    assert [each.lag for each in clock.known()] == [0], "the last one, when it is asked for"
    assert clock.known() == []


class Device:
    """Works off what it is given; `is_through` with the first so many events."""

    def __init__(self) -> None:
        self.num_recorded = self.is_through = 0

    def event(self) -> "Device.Event":
        return Device.Event(self)

    class Event:
        def __init__(self, device: "Device") -> None:
            self.device, self.at = device, -1

        def record(self) -> None:
            self.at, self.device.num_recorded = (
                self.device.num_recorded,
                self.device.num_recorded + 1,
            )

        def query(self) -> bool:
            return self.at < self.device.is_through

        def elapsed_time(self, other: "Device.Event") -> float:
            assert self.query() and other.query(), "asked before it was there: that would wait"
            return float(other.at)


@pytest.mark.parametrize("ahead", [1, 3, MAX_LATE - 1])
def test_a_host_that_runs_ahead_of_its_device_loses_no_measurement(
    tmp_path: Path, ahead: int
) -> None:
    device = Device()
    clock = DeviceEventClock(device.event)
    pace = hooks.attach(job="j", rank=0, world_size=1, ring_dir=str(tmp_path), timer=clock)
    for step in range(80):
        with pace.step(step), pace.micro_batch_timer(tokens=1000 + step):
            device.is_through = max(device.is_through, device.num_recorded - 2 * ahead)
    device.is_through = device.num_recorded
    pace.detach()
    assert pace.ring.path is not None
    told = [r for r in records_in(pace.ring.path) if isinstance(r, MicroBatchRecord)]
    assert [(r.step, r.tokens) for r in told] == [(step, 1000 + step) for step in range(80)]
    assert [r.compute_s for r in told] == pytest.approx([(2 * n + 1) * 1e-3 for n in range(80)])
    assert (clock.num_lost, pace.ring.num_errors) == (0, 0)


def test_what_a_device_is_too_far_behind_with_is_counted_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device()
    clock = DeviceEventClock(device.event)
    pace = hooks.attach(job="j", rank=0, world_size=1, ring_dir=str(tmp_path), timer=clock)
    pace.step_began(0)
    for number in range(MAX_LATE + 3):
        with pace.micro_batch_timer(tokens=number):
            pass
    assert (clock.num_lost, len(caplog.records)) == (3, 1)
    device.is_through = device.num_recorded
    with pace.micro_batch_timer(tokens=999):
        pass
    assert pace.ring.path is not None
    told = [r for r in records_in(pace.ring.path) if isinstance(r, MicroBatchRecord)]
    assert [r.tokens for r in told] == list(range(3, MAX_LATE + 3)), "the newest, with their work"


def test_a_fault_of_the_device_is_part_of_each_segment() -> None:
    FakeEvent.finished = True
    burnt: list[FakeEvent] = []
    clock = DeviceEventClock(FakeEvent, burn=burnt.append)
    clock.begin()
    clock.pause()
    clock.resume()
    clock.end()
    ((_, ((first, ended), (second, _)), _),) = clock._ended
    assert burnt == [first, second], "told where its segment began, before the end is marked"
    assert ended not in burnt
