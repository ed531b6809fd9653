"""Times that a device tells late: never waited for, and each is told with its own work."""

from pathlib import Path
from typing import Any

import pytest

from pacekeeper.core.telemetry.records import MicroBatchRecord, Record
from pacekeeper.trainer.hooks import hooks
from pacekeeper.trainer.hooks.compute_timers import MAX_LATE, ComputeTime, DeviceEventClock
from support.rings import records_in


def told(pace: hooks.Hooks) -> list[Record]:
    assert pace.ring.path is not None
    return records_in(pace.ring.path)


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
    found = [r for r in told(pace) if isinstance(r, MicroBatchRecord)]
    assert [(r.step, r.tokens) for r in found] == [(step, 1000 + step) for step in range(80)]
    assert [r.compute_s for r in found] == pytest.approx([(2 * n + 1) * 1e-3 for n in range(80)])
    assert (clock.num_lost, pace.ring.num_errors) == (0, 0)


def test_what_a_device_is_too_far_behind_with_is_counted_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device()
    clock = DeviceEventClock(device.event)
    pace = hooks.attach(job="j", rank=0, world_size=1, ring_dir=str(tmp_path), timer=clock)
    pace.begin_step(0)
    for number in range(MAX_LATE + 3):
        with pace.micro_batch_timer(tokens=number):
            pass
    assert (clock.num_lost, len(caplog.records)) == (3, 1)
    device.is_through = device.num_recorded
    with pace.micro_batch_timer(tokens=999):
        pass
    found = [r for r in told(pace) if isinstance(r, MicroBatchRecord)]
    assert [r.tokens for r in found] == list(range(3, MAX_LATE + 3)), "the newest, with their work"


def test_a_late_clock_is_paired_with_the_micro_batch_it_measured(tmp_path: Path) -> None:
    pace = hooks.attach(job="j", rank=0, world_size=1, ring_dir=str(tmp_path))
    late = ComputeTime(compute_s=0.5, lag=1)
    pace.begin_step(0)
    pace.report_microbatch(compute=None, tokens=10)
    pace.set_generation(7)
    pace.begin_step(1)
    pace.report_microbatch(compute=late, tokens=99)
    pace.report_microbatch(compute=None, tokens=98)
    pace.report_microbatch(compute=late, tokens=97)
    found = [r for r in told(pace) if isinstance(r, MicroBatchRecord)]
    assert [(r.step, r.micro_batch, r.generation, r.tokens) for r in found] == [
        (0, 0, 0, 10),
        (1, 1, 7, 98),
    ]


def test_times_that_become_known_together_are_told_oldest_first(tmp_path: Path) -> None:
    pace = hooks.attach(job="j", rank=0, world_size=1, ring_dir=str(tmp_path))
    pace.begin_step(0)
    for tokens in (10, 11, 12):
        pace.report_microbatch(compute=None, tokens=tokens)
    newer = ComputeTime(compute_s=0.2, lag=1)
    pace.report_microbatch(compute=ComputeTime(compute_s=0.1, lag=2, more=(newer,)), tokens=13)
    pace.report_microbatch(
        compute=ComputeTime(compute_s=0.9, lag=9), tokens=14
    )  # nobody knows its work
    found = [r for r in told(pace) if isinstance(r, MicroBatchRecord)]
    assert [(r.micro_batch, r.tokens, r.compute_s) for r in found] == [(1, 11, 0.1), (2, 12, 0.2)]
    assert pace.ring.num_errors == 0


def test_a_bad_value_among_times_that_become_known_together_loses_its_own_record(
    tmp_path: Path,
) -> None:
    pace = hooks.attach(job="j", rank=0, world_size=1, ring_dir=str(tmp_path))
    for tokens in (-1, 11):
        pace.report_microbatch(compute=None, tokens=tokens)
    newer = ComputeTime(compute_s=0.2, lag=1)
    pace.report_microbatch(compute=ComputeTime(compute_s=0.1, lag=2, more=(newer,)), tokens=12)
    (record,) = told(pace)
    assert isinstance(record, MicroBatchRecord) and record.tokens == 11
    assert pace.ring.num_errors == 1
