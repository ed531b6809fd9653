"""The fixed probe: the same short work on every rank, so that its time shows a device's speed.

Some matrix products, some copies, one message to the next rank. No repeat begins after a budget,
which aims at 50 ms for devices up to four times slow; what has begun is ended, however long an
overloaded host takes, and the message waits for the slowest rank. It changes no state.

The probe of pairs measures links: each pair of ranks exchanges messages, in rounds of disjoint
pairs, so that no pair waits for another. No round begins after a budget.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from pacekeeper.core.telemetry.pair_probe import rounds_of
from pacekeeper.core.telemetry.records import MAX_S
from pacekeeper.trainer.emulation.engine_device import EngineDevice
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.hooks.compute_timers import DeviceEventClock, SegmentClock

REPEATS = 5  # of which the median counts
BUDGET_S = 0.015  # of a kind: no further repeat begins after it
EMULATED_S = 0.002  # of one repeat on a healthy emulated device
MATRIX_SIZE, COPIED_FLOATS = 192, 1 << 20  # about a millisecond of one core
DEVICE_MATRIX_SIZE, DEVICE_COPIED_FLOATS = 2048, 1 << 24  # less than that of a large GPU
SENT_FLOATS = 1 << 14
PAIR_REPEATS = 3  # of which the median counts
PAIRS_BUDGET_S = 2.0  # of all rounds: none begins after it
PAIR_S = 0.005  # that an exchange aims at: latency is little of it
LEAST_PAIR_BYTES, MOST_PAIR_BYTES = 1 << 16, 1 << 25


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """Seconds of one product, one copy and one message, and of the whole probe."""

    gemm_s: float
    copy_s: float
    exchange_s: float
    duration_s: float


def run_probe(
    groups: EngineGroups, clock: SegmentClock, device: torch.device
) -> ProbeResult | None:
    """Run the probe on this rank; all ranks call it together.

    Args:
        groups: Of the ranks.
        clock: The rank's own: injected faults are measured, too.
        device: Where the rank computes.

    Returns:
        The times; None if the device has no memory left for it.

    Raises:
        PeerLost: A rank is lost.
    """
    began_s = time.perf_counter()
    try:
        times = _compute_times(clock, device)
    except torch.OutOfMemoryError:
        times = None  # the others wait for the message all the same
    exchange_s = _exchange_s(groups, device)
    if times is None:
        return None
    return ProbeResult(
        gemm_s=times[0],
        copy_s=times[1],
        exchange_s=exchange_s,
        duration_s=time.perf_counter() - began_s,
    )


def _compute_times(clock: SegmentClock, device: torch.device) -> tuple[float, float]:
    """Return (product, copy), median seconds of one by the rank's own clock."""
    is_cpu = device.type == "cpu"
    size = MATRIX_SIZE if is_cpu else DEVICE_MATRIX_SIZE
    matrix = torch.full((size, size), 0.5, device=device)
    source = torch.zeros(COPIED_FLOATS if is_cpu else DEVICE_COPIED_FLOATS, device=device)
    product, target = torch.empty_like(matrix), torch.empty_like(source)
    return (
        _median_s(lambda: torch.mm(matrix, matrix, out=product), clock),
        _median_s(lambda: target.copy_(source), clock),
    )


def _median_s(action: Callable[[], Tensor], clock: SegmentClock) -> float:
    spent_s: list[float] = []
    began_s = time.perf_counter()
    while not spent_s or (len(spent_s) < REPEATS and time.perf_counter() - began_s < BUDGET_S):
        if isinstance(clock, DeviceEventClock):
            spent_s.append(_device_s(action, clock))
            continue
        clock.begin()
        if isinstance(clock, EngineDevice):
            clock.add_time(EMULATED_S)
        action()
        compute = clock.end()
        assert compute is not None, "clocks of the host know it at once"
        spent_s.append(compute.compute_s)
    return median(spent_s)


def _device_s(action: Callable[[], Tensor], clock: DeviceEventClock) -> float:
    """Time one by events of its own: the clock still holds those of the last micro-batch."""
    began, ended = clock.new_event(), clock.new_event()
    began.record()
    action()
    ended.record()
    ended.synchronize()
    spent_ms: float = began.elapsed_time(ended)
    return spent_ms * 1e-3


def _exchange_s(groups: EngineGroups, device: torch.device) -> float:
    """Return the seconds of a message to the next rank and one from the rank before."""
    group = groups.exchange
    at, size = group.ranks.index(group.rank), len(group.ranks)
    sent, got = [0] * size, [0] * size
    sent[(at + 1) % size] = got[(at - 1) % size] = SENT_FLOATS
    rows = torch.zeros(SENT_FLOATS, device=device)
    groups.control.all_gather(torch.zeros(1))  # all begin together
    began_s = time.perf_counter()
    output = torch.empty_like(rows)
    group.all_to_all_rows(output, rows, got, sent).wait()
    output[0].item()  # a device has received it
    return time.perf_counter() - began_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PairResult:
    """Seconds of one exchange with `peer`: `num_bytes` in each direction at the same time."""

    peer: int
    num_bytes: int
    exchange_s: float


def probe_pairs(
    groups: EngineGroups, clock: SegmentClock, device: torch.device
) -> tuple[PairResult, ...]:
    """Measure each pair of ranks in turn; all ranks call it together.

    Args:
        groups: Of the ranks.
        clock: The rank's own: emulated links are measured where it emulates them.
        device: Where the messages lie.

    Returns:
        What this rank measured with its peers, in the rounds that the budget allowed; empty if a
        device has no memory left for the messages, or emulated links have no speed.

    Raises:
        PeerLost: A rank is lost.
    """
    began_s, own = time.perf_counter(), groups.exchange.rank
    try:
        buffers = _pair_buffers(device)
    except torch.OutOfMemoryError:
        began_s = -MAX_S  # known to all before the first round
    found = []
    for pairs in rounds_of(groups.exchange.ranks):
        passed = torch.tensor([time.perf_counter() - began_s], dtype=torch.float64)
        if float(groups.control.all_gather(passed).max()) > PAIRS_BUDGET_S:
            break
        for pair in pairs:
            if own in pair:
                found.append(_pair_result(groups, clock, buffers, sum(pair) - own))
    return tuple(result for result in found if result is not None)


def _pair_buffers(device: torch.device) -> tuple[Tensor, Tensor]:
    sent = torch.zeros(MOST_PAIR_BYTES, dtype=torch.uint8, device=device)
    return sent, torch.empty_like(sent)


def _pair_result(
    groups: EngineGroups, clock: SegmentClock, buffers: tuple[Tensor, Tensor], peer: int
) -> PairResult | None:
    """Measure one pair with messages that take about PAIR_S, which both of its ranks agree on.

    So the rate of a pair does not depend on how slow others are: of small messages it would be the
    latency, and a hiccup of the host.
    """
    least = buffers[0][:LEAST_PAIR_BYTES], buffers[1][:LEAST_PAIR_BYTES]
    least_s = min(_pair_s(groups, clock, least, peer) for _ in range(2))  # the first may connect
    told = torch.tensor([least_s], dtype=torch.float64, device=least[0].device)
    heard = torch.empty_like(told)
    groups.exchange.point_to_point([(peer, told)], [(peer, heard)]).wait()
    slower_s = max(least_s, heard.item())
    if slower_s <= 0.0:
        return None  # emulated links without a speed
    wanted = LEAST_PAIR_BYTES * PAIR_S / slower_s
    num_bytes = 1 << round(min(max(wanted, LEAST_PAIR_BYTES), MOST_PAIR_BYTES)).bit_length() - 1
    own = buffers[0][:num_bytes], buffers[1][:num_bytes]
    spent_s = [_pair_s(groups, clock, own, peer) for _ in range(PAIR_REPEATS)]
    return PairResult(peer=peer, num_bytes=num_bytes, exchange_s=median(spent_s))


def _pair_s(
    groups: EngineGroups, clock: SegmentClock, buffers: tuple[Tensor, Tensor], peer: int
) -> float:
    """Return the seconds of one exchange with a peer, as emulated where links are."""
    sent, got = buffers
    emulated = clock.links if isinstance(clock, EngineDevice) else None
    began_s = time.perf_counter() if emulated is None else emulated.begin()
    groups.exchange.point_to_point([(peer, sent)], [(peer, got)]).wait()
    got[-1].item()  # a device has received it
    if emulated is None:
        return time.perf_counter() - began_s
    emulated.end(began_s, 2 * sent.nbytes)
    return emulated.take()[0] or 0.0
