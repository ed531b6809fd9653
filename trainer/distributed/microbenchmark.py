"""The fixed probe: the same short work on every rank, so that its time says a device's speed.

Some matrix products, some copies, one message to the next rank. No repeat is begun after a budget,
which aims at 50 ms for devices up to four times slow; what has begun is ended, however long an
overloaded host takes, and the message waits for the slowest. No decision, no state, no ticket: who
loses its group in it goes on as after any loss.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from pacekeeper.trainer.distributed.collectives import Collectives
from pacekeeper.trainer.emulation.device import EmulatedClock
from pacekeeper.trainer.hooks.compute_timers import DeviceEventClock, SegmentClock
from pacekeeper.trainer.toy.model.flop_counter import NO_WORK, OpCount, WorkMeter

REPEATS = 5  # of which the median counts
BUDGET_S = 0.015  # of a kind: no further repeat is begun after it
EMULATED_S = 0.002  # of one repeat on an emulated device that is well
MATRIX_SIZE, COPIED_FLOATS = 192, 1 << 20  # about a millisecond of one core
DEVICE_MATRIX_SIZE, DEVICE_COPIED_FLOATS = 2048, 1 << 24  # less than that of a large GPU
SENT_FLOATS = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """Seconds of one product, one copy and one message, and of the whole probe."""

    gemm_s: float
    copy_s: float
    exchange_s: float
    duration_s: float


def run(
    fabric: Collectives, clock: SegmentClock, meter: WorkMeter, device: torch.device
) -> ProbeResult | None:
    """All members of `fabric` run it at once; None where the device has no room for it.

    Raises PeerLost where one of them is lost.
    """
    began_s = time.perf_counter()
    try:
        times = _measured(clock, meter, device)
    except torch.OutOfMemoryError:
        times = None  # the others wait for the message all the same
    exchange_s = _exchanged(fabric)
    if times is None:
        return None
    return ProbeResult(
        gemm_s=times[0],
        copy_s=times[1],
        exchange_s=exchange_s,
        duration_s=time.perf_counter() - began_s,
    )


def _measured(clock: SegmentClock, meter: WorkMeter, device: torch.device) -> tuple[float, float]:
    """(product, copy): median seconds of one, by the rank's own clock, faults included."""
    is_cpu = device.type == "cpu"
    size = MATRIX_SIZE if is_cpu else DEVICE_MATRIX_SIZE
    matrix = torch.full((size, size), 0.5, device=device)
    source = torch.zeros(COPIED_FLOATS if is_cpu else DEVICE_COPIED_FLOATS, device=device)
    product, target = torch.empty_like(matrix), torch.empty_like(source)
    gemm = copy = NO_WORK
    if isinstance(clock, EmulatedClock):
        gemm = OpCount(flops=clock.device.flops_per_s * EMULATED_S)
        copy = OpCount(bytes=clock.device.bytes_per_s * EMULATED_S)
    return (
        _median_s(lambda: torch.mm(matrix, matrix, out=product), gemm, clock, meter),
        _median_s(lambda: target.copy_(source), copy, clock, meter),
    )


def _median_s(
    action: Callable[[], Tensor], work: OpCount, clock: SegmentClock, meter: WorkMeter
) -> float:
    spent_s: list[float] = []
    began_s = time.perf_counter()
    while not spent_s or (len(spent_s) < REPEATS and time.perf_counter() - began_s < BUDGET_S):
        if isinstance(clock, DeviceEventClock):
            spent_s.append(_device_s(action, clock))
            continue
        clock.begin()
        meter.add(work)
        action()
        compute = clock.end()
        assert compute is not None, "clocks of the host tell at once"
        spent_s.append(compute.compute_s)
    return median(spent_s)


def _device_s(action: Callable[[], Tensor], clock: DeviceEventClock) -> float:
    """By events of its own: the clock still holds those of the last micro-batch. It waits."""
    began, ended = clock.new_event(), clock.new_event()
    began.record()
    action()
    if clock.burn is not None:
        clock.burn(began)
    ended.record()
    ended.synchronize()
    spent_ms: float = began.elapsed_time(ended)
    return spent_ms * 1e-3


def _exchanged(fabric: Collectives) -> float:
    """One message to the next rank in order, one from the rank before; all begin together."""
    ranks = fabric.ranks
    at, size = ranks.index(fabric.rank), len(ranks)
    sent, got = [0] * size, [0] * size
    sent[(at + 1) % size] = got[(at - 1) % size] = SENT_FLOATS
    fabric.exchange([1.0])
    began_s = time.perf_counter()
    fabric.all_to_all(torch.empty(SENT_FLOATS), torch.zeros(SENT_FLOATS), got, sent)
    return time.perf_counter() - began_s
