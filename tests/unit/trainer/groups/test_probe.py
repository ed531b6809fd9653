"""The probe reads the rank's own clock, faults included, and disturbs nothing of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock

import pytest
import torch
from torch import Tensor

from pacekeeper.core.kernel_laws.noise import NO_NOISE
from pacekeeper.trainer.emulation.engine_device import EngineDevice
from pacekeeper.trainer.groups import probe as probe_module
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.groups.group import SingleProcess
from pacekeeper.trainer.groups.probe import (
    EMULATED_S,
    LEAST_PAIR_BYTES,
    REPEATS,
    PairResult,
    ProbeResult,
    probe_pairs,
    run_probe,
)
from pacekeeper.trainer.hooks.compute_timers import (
    CpuClock,
    DeviceEventClock,
    SegmentClock,
    WallClock,
)
from support.rank_threads import ThreadGroup, run_ranks

CPU = torch.device("cpu")


def emulated(slowdown: float) -> EngineDevice:
    device = EngineDevice.seeded(0, NO_NOISE)
    device.slowdown = slowdown
    return device


def probe(clock: SegmentClock) -> ProbeResult:
    result = run_probe(EngineGroups.single_process(), clock, CPU)
    assert result is not None
    return result


@pytest.mark.parametrize("slowdown", [1.0, 1.6, 3.0])
def test_an_emulated_device_shows_its_fault(slowdown: float) -> None:
    result = probe(emulated(slowdown))
    assert result.gemm_s == pytest.approx(EMULATED_S * slowdown)
    assert result.copy_s == pytest.approx(EMULATED_S * slowdown)
    assert result.duration_s >= result.gemm_s + result.copy_s


def test_no_time_of_the_probe_is_left_for_the_next_micro_batch() -> None:
    device = emulated(1.0)
    probe(device)
    device.begin()
    compute = device.end()
    assert compute is not None
    assert compute.compute_s == 0.0


def test_a_very_slow_device_runs_each_kind_once_and_no_more() -> None:
    slow, healthy = emulated(20.0), emulated(1.0)
    probe(slow)
    assert slow.num_segments == 2
    probe(healthy)
    assert healthy.num_segments <= 2 * REPEATS


def test_the_clock_of_a_thread_measures_it() -> None:
    assert probe(CpuClock()).gemm_s > 0.0


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
    clock = DeviceEventClock(lambda: Event(times))
    clock.begin()
    clock.end()
    result = probe(clock)
    assert (result.gemm_s, result.copy_s) == pytest.approx((3e-3, 3e-3))
    clock.begin()
    previous = clock.end()
    assert previous is not None
    assert previous.compute_s == pytest.approx(7e-3)


def test_a_device_without_memory_gives_no_times_but_the_others_get_its_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "full", full)

    def run(group: ThreadGroup) -> ProbeResult | None:
        groups = EngineGroups(exchange=group, gradients=group, control=group, snapshots=group)
        return run_probe(groups, emulated(1.0), CPU)

    assert run_ranks(3, run) == [None] * 3


def test_each_rank_sends_to_the_next() -> None:
    class Watched(SingleProcess):
        def __init__(self) -> None:
            SingleProcess.__init__(self, 4)
            self.ranks = (1, 4, 6)
            self.sizes: list[tuple[list[int], list[int]]] = []

        def all_to_all_rows(self, output: Tensor, rows: Tensor, receive, send):  # type: ignore[no-untyped-def]
            self.sizes.append(([n > 0 for n in receive], [n > 0 for n in send]))
            return SingleProcess.all_to_all_rows(self, output, rows, receive, send)

    group = Watched()
    groups = EngineGroups(exchange=group, gradients=group, control=group, snapshots=group)
    assert run_probe(groups, emulated(1.0), CPU) is not None
    assert group.sizes == [([True, False, False], [False, False, True])]


def pairs_of(num_ranks: int, clocks: Mapping[int, SegmentClock]) -> list[tuple[PairResult, ...]]:
    def run(group: ThreadGroup) -> tuple[PairResult, ...]:
        control = group.another("control")
        groups = EngineGroups(exchange=group, gradients=group, control=control, snapshots=group)
        return probe_pairs(groups, clocks.get(group.rank) or WallClock(), CPU)

    return run_ranks(num_ranks, run)


def on_links(bytes_per_s: float, slowdown: float = 1.0) -> EngineDevice:
    device = emulated(1.0)
    device.links.bytes_per_s, device.links.slowdown = bytes_per_s, slowdown
    return device


@pytest.mark.parametrize("num_ranks", [2, 4, 5])
def test_each_pair_is_measured_once_by_both_of_its_ranks(num_ranks: int) -> None:
    found = pairs_of(num_ranks, {})
    for rank, own in enumerate(found):
        assert sorted(pair.peer for pair in own) == [r for r in range(num_ranks) if r != rank]
        assert all(pair.exchange_s > 0.0 for pair in own)
    sizes = {(rank, pair.peer): pair.num_bytes for rank, own in enumerate(found) for pair in own}
    assert all(sizes[rank, peer] == sizes[peer, rank] for rank, peer in sizes)


def test_a_slow_port_does_not_shorten_the_messages_of_other_pairs() -> None:
    found = pairs_of(4, {rank: on_links(1e9, 100.0 if rank == 1 else 1.0) for rank in range(4)})
    sizes = {(rank, pair.peer): pair.num_bytes for rank, own in enumerate(found) for pair in own}
    healthy = {size for pair, size in sizes.items() if 1 not in pair}
    assert {size for pair, size in sizes.items() if 1 in pair} == {LEAST_PAIR_BYTES}
    assert healthy == {1 << 21}  # 2 x 2 MiB at 1 GB/s: 4.2 ms


def test_an_emulated_slow_port_is_measured_in_all_its_pairs() -> None:
    clocks = {rank: on_links(5e7, 3.0 if rank == 1 else 1.0) for rank in range(4)}
    found = pairs_of(4, clocks)
    times = {(rank, pair.peer): pair.exchange_s for rank, own in enumerate(found) for pair in own}
    healthy = times[0, 2]
    for (rank, peer), exchange_s in times.items():
        both = max(exchange_s, times[peer, rank])
        assert both / healthy == pytest.approx(3.0 if 1 in (rank, peer) else 1.0)


def test_emulated_links_without_a_speed_are_not_measured() -> None:
    assert pairs_of(2, {rank: emulated(1.0) for rank in range(2)}) == [(), ()]


def test_no_round_begins_after_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "PAIRS_BUDGET_S", 0.0)
    assert pairs_of(4, {}) == [()] * 4


def test_a_device_without_memory_for_messages_ends_the_rounds_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffers, told = probe_module._pair_buffers, Lock()

    def full(device: torch.device) -> tuple[Tensor, Tensor]:
        if told.acquire(blocking=False):  # one of the ranks
            raise torch.OutOfMemoryError("no room")
        return buffers(device)

    monkeypatch.setattr(probe_module, "_pair_buffers", full)
    clocks = {rank: on_links(1e9) for rank in range(3)}
    assert pairs_of(3, clocks) == [()] * 3
