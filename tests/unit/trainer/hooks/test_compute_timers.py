"""Clocks of the host count compute and nothing else."""

import time
from pathlib import Path

import pytest

from pacekeeper.trainer.hooks import compute_timers
from pacekeeper.trainer.hooks.compute_timers import SHORT_S, CpuClock, WallClock


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


def test_a_segment_that_begins_soon_reads_no_clock_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, cpu_s, reads = [10.0], [1.0], list[float]()

    def thread_time() -> float:
        reads.append(cpu_s[0])
        return cpu_s[0]

    monkeypatch.setattr(compute_timers, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(compute_timers, "thread_time", thread_time)
    monkeypatch.setattr(compute_timers, "SCHEDSTAT", "/nowhere")
    clock = CpuClock()

    def spend(wall_s: float, of_cpu_s: float) -> None:
        now_s[0] += wall_s
        cpu_s[0] += of_cpu_s

    clock.begin()
    spend(2.0, 1.5)
    aside = clock.suspend()
    spend(SHORT_S / 2, SHORT_S / 2)  # the thread computes on, for itself
    assert len(reads) == 2
    clock.resume_suspended(aside)
    assert len(reads) == 2
    spend(1.0, 1.0)
    aside = clock.suspend()
    spend(60.0, 0.0)  # it sleeps
    clock.resume_suspended(aside)
    assert len(reads) == 4
    spend(1.0, 1.0)
    done = clock.end()
    assert done is not None
    assert done.cpu_s == pytest.approx(3.5)
    spend(SHORT_S / 2, 0.0)  # it was off the CPU in a gap that is short
    clock.begin()
    spend(SHORT_S / 4, SHORT_S / 4)
    done = clock.end()
    assert done is not None and done.cpu_s == 0.0
