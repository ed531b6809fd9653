"""Rules for samples of a node's kernel and of a rank's thread that explain a slow rank.

A condition of a node should slow all its ranks alike: healthy ranks on the node lower the tier, and
refute the cause if no other node reports the signal. Times that the kernel counted for the thread
itself are the strongest evidence.
"""

from collections.abc import Callable
from statistics import median

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.core.telemetry.samples import HostSample
from pacekeeper.predictor.causes.evidence import (
    CauseKind,
    HostWindow,
    Rule,
    RuleResult,
    Symptoms,
    ThreadTime,
    compare_with_peers,
    found,
    grown,
    lower,
    measured_values,
)

PRESSED_RATIO = 0.10  # of the time: the loss of the smallest slowdown worth a finding
LOST_RATIO = 0.10
LOADED = 1.0  # runnable tasks per core
USED_RATIO = 0.95  # of memory: beyond it the kernel reclaims pages continuously
SWAPPING_MIB_PER_S = 1.0
RESENT_RATIO = 0.01  # of TCP segments: beyond it a connection's window collapses repeatedly

_Read = Callable[[HostWindow], float | None]


def _worst(read: Callable[[HostSample], float | None]) -> _Read:
    return lambda window: max(measured_values([read(s) for s in window.during]), default=None)


def _growth(field: str) -> _Read:
    """Growth of a counter since the last sample before the onset."""
    return lambda window: grown([getattr(sample, field) for sample in window.since_before])


def _load_per_core(sample: HostSample) -> float | None:
    """The load average over one minute, which includes tasks that wait for disk, per core."""
    if sample.load_1min is None or not sample.num_cores:
        return None
    return sample.load_1min / sample.num_cores


def _memory_used(sample: HostSample) -> float | None:
    if sample.memory_available_bytes is None or not sample.memory_bytes:
        return None
    return 1.0 - sample.memory_available_bytes / sample.memory_bytes


def _swapped_in_mib_per_s(sample: HostSample) -> float | None:
    speed = sample.swap_in_bytes_per_s
    return None if speed is None else speed / 2**20


def _ports_down(sample: HostSample) -> float | None:
    if sample.fabric_ports is None or sample.fabric_ports_up is None:
        return None
    return sample.fabric_ports - sample.fabric_ports_up


def _above(
    subject: str, kind: CauseKind, most: Tier, read: _Read, limit: float, words: str
) -> Rule:
    """Make a rule: a node above the limit is a cause if other nodes stay below it."""

    def rule(symptoms: Symptoms) -> RuleResult:
        mine = None if symptoms.host is None else read(symptoms.host)
        if mine is None:
            return RuleResult(subject=subject, is_reported=False)
        among = compare_with_peers(map(read, symptoms.peer_hosts), lambda worst: worst > limit)
        neighbours = symptoms.neighbours
        is_shared = neighbours > 0 and not among.reported  # all other ranks with it are healthy
        if mine <= limit or among.is_refuted or is_shared:
            return RuleResult(subject=subject)
        others = "no other node to compare with"
        if among.reported:
            others = f"{among.shared or 'none'} of {among.reported} other nodes"
        if neighbours:
            are = "rank is" if neighbours == 1 else "ranks are"
            others += f", though {neighbours} healthy {are} on it too"
        sure = lower(among.sure(most)) if neighbours else among.sure(most)
        return found(subject, kind, sure, f"{words.format(mine=mine, rest=1.0 - mine)} ({others})")

    return rule


_HOST, _NETWORK = CauseKind.HOST, CauseKind.NETWORK
_PROBABLE, _SUSPECTED = Tier.PROBABLE, Tier.SUSPECTED
NODE: tuple[Rule, ...] = (
    _above("memory pressure", _HOST, _PROBABLE, _worst(lambda s: s.memory_full_ratio),
           PRESSED_RATIO, "all tasks of its node waited for memory {mine:.0%} of the time"),
    _above("swapping", _HOST, _PROBABLE, _worst(_swapped_in_mib_per_s), SWAPPING_MIB_PER_S,
           "its node reads {mine:.1f} MiB/s back from swap"),
    _above("I/O pressure", _HOST, _SUSPECTED, _worst(lambda s: s.io_full_ratio), PRESSED_RATIO,
           "all tasks of its node waited for storage {mine:.0%} of the time"),
    _above("CPU pressure", _HOST, _SUSPECTED, _worst(lambda s: s.cpu_some_ratio), PRESSED_RATIO,
           "some task of its node waited for a core {mine:.0%} of the time"),
    _above("memory left", _HOST, _SUSPECTED, _worst(_memory_used), USED_RATIO,
           "{rest:.1%} of its node's memory is left"),
    _above("host load", _HOST, _SUSPECTED, _worst(_load_per_core), LOADED,
           "load average {mine:.1f} per core of its node"),
    _above("network", _NETWORK, _SUSPECTED, _worst(lambda s: s.tcp_resent_ratio), RESENT_RATIO,
           "its node sent {mine:.1%} of its TCP segments again"),
    _above("network", _NETWORK, _SUSPECTED, _growth("network_errors"), 0.0,
           "{mine:.0f} new errors on its node's interfaces"),
    _above("fabric", _NETWORK, _PROBABLE, _worst(_ports_down), 0.0,
           "{mine:.0f} fabric ports of its node are down"),
    _above("fabric", _NETWORK, _SUSPECTED, _growth("fabric_errors"), 0.0,
           "{mine:.0f} new errors on its node's fabric links"),
)  # fmt: skip


def stall(symptoms: Symptoms) -> RuleResult:
    """Find time in which the rank's thread neither ran nor was runnable.

    It was stopped, swapped out, on I/O, or waited for other threads, which may lack a core.
    The time is part of the compute time and can be compared with the slowdown: CONFIRMED only if it
    explains at least half of it (of its logarithm).
    """

    def share(thread: ThreadTime) -> float | None:
        if thread.stall_s is None:
            return None
        # Another clock may count differently: limited to the whole time.
        return min(1.0, thread.stall_s / thread.compute_s) if thread.compute_s > 0.0 else 0.0

    mine, slowdown = symptoms.thread and share(symptoms.thread), symptoms.slowdown
    made = 1.0 / max(1.0 - (mine or 0.0), 1e-3)
    most = Tier.CONFIRMED if slowdown is not None and made**2 >= slowdown else Tier.PROBABLE
    what = "was not runnable (stopped, swapped out, waiting for storage or another thread)"
    return _if_time_lost(symptoms, "stall", CauseKind.STALLED, most, share, what)


def run_queue(symptoms: Symptoms) -> RuleResult:
    """Find time in which the rank's thread was runnable and waited for a core."""

    def share(thread: ThreadTime) -> float | None:
        if thread.run_queue_s is None:
            return None
        whole_s = thread.compute_s + thread.run_queue_s
        return thread.run_queue_s / whole_s if whole_s > 0.0 else 0.0

    kind, what = CauseKind.CORE_TAKEN, "waited for a core"
    return _if_time_lost(symptoms, "run-queue wait", kind, Tier.PROBABLE, share, what)


def _if_time_lost(
    symptoms: Symptoms,
    subject: str,
    kind: CauseKind,
    most: Tier,
    share: Callable[[ThreadTime], float | None],
    what: str,
) -> RuleResult:
    """Return a cause if the thread lost clearly more of its time than its peers."""
    mine = None if symptoms.thread is None else share(symptoms.thread)
    if mine is None:
        return RuleResult(subject=subject, is_reported=False)
    theirs = measured_values([share(thread) for thread in symptoms.peer_threads])
    among = compare_with_peers(theirs, lambda lost: lost > mine - LOST_RATIO)
    if mine <= LOST_RATIO or among.is_refuted:
        return RuleResult(subject=subject)
    against = f"{median(theirs):.0%} of its peers' time" if theirs else "no peer to compare with"
    words = f"its thread {what} {mine:.0%} of its time, {against}"
    return found(subject, kind, among.sure(most), words)


THREAD: tuple[Rule, ...] = (stall, run_queue)
