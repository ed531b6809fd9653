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
    Cause,
    CauseKind,
    HostWindow,
    RuleResult,
    Symptoms,
    ThreadTime,
    compare_with_peers,
    grown,
    lower,
    measured_values,
)

PRESSED_RATIO = 0.10  # of the time: the loss of the smallest slowdown worth a finding
LOST_RATIO = 0.10
LOADED = 1.0  # runnable tasks per core
LEFT_RATIO = 0.05  # of memory: below it the kernel reclaims pages continuously
SWAPPING_BYTES_PER_S = 1 << 20
RESENT_RATIO = 0.01  # of TCP segments: beyond it a connection's window collapses repeatedly

_Reading = Callable[[HostSample], float | None]
_Worst = Callable[[HostWindow], float | None]


def host_load(symptoms: Symptoms) -> RuleResult:
    """Find a load average above one task per core (1 minute; includes tasks that wait for disk)."""

    def per_core(sample: HostSample) -> float | None:
        if sample.load_1min is None or not sample.num_cores:
            return None
        return sample.load_1min / sample.num_cores

    def words(worst: float) -> str:
        return f"load average {worst:.1f} per core of its node"

    return _if_above_limit(symptoms, "host load", per_core, LOADED, words, Tier.SUSPECTED)


def cpu_pressure(symptoms: Symptoms) -> RuleResult:
    """Find tasks of the node that wait for a core."""
    what = "some task of its node waited for a core"
    return _pressure(symptoms, "CPU pressure", lambda s: s.cpu_some_ratio, what, Tier.SUSPECTED)


def io_pressure(symptoms: Symptoms) -> RuleResult:
    """Find times in which all tasks of the node wait for storage."""
    what = "all tasks of its node waited for storage"
    return _pressure(symptoms, "I/O pressure", lambda s: s.io_full_ratio, what, Tier.SUSPECTED)


def memory_pressure(symptoms: Symptoms) -> RuleResult:
    """Find times in which all tasks of the node wait for memory."""
    what = "all tasks of its node waited for memory"
    return _pressure(
        symptoms, "memory pressure", lambda s: s.memory_full_ratio, what, Tier.PROBABLE
    )


def memory_left(symptoms: Symptoms) -> RuleResult:
    """Find a node whose memory is nearly full."""

    def used(sample: HostSample) -> float | None:
        if sample.memory_available_bytes is None or not sample.memory_bytes:
            return None
        return 1.0 - sample.memory_available_bytes / sample.memory_bytes

    def words(worst: float) -> str:
        return f"{1.0 - worst:.1%} of its node's memory is left"

    limit = 1.0 - LEFT_RATIO
    return _if_above_limit(symptoms, "memory left", used, limit, words, Tier.SUSPECTED)


def swapping(symptoms: Symptoms) -> RuleResult:
    """Find pages read back from swap, for which threads wait."""

    def words(worst: float) -> str:
        return f"its node reads {worst / 2**20:.1f} MiB/s back from swap"

    return _if_above_limit(
        symptoms,
        "swapping",
        lambda s: s.swap_in_bytes_per_s,
        SWAPPING_BYTES_PER_S,
        words,
        Tier.PROBABLE,
    )


def network(symptoms: Symptoms) -> RuleResult:
    """Find retransmitted TCP segments and interface errors, which delay messages."""

    def words(worst: float) -> str:
        return f"its node sent {worst:.1%} of its TCP segments again"

    kind = CauseKind.NETWORK
    resent = _if_above_limit(
        symptoms,
        "network",
        lambda s: s.tcp_resent_ratio,
        RESENT_RATIO,
        words,
        Tier.SUSPECTED,
        kind,
    )
    errors = _if_grown(symptoms, "network", "network_errors", "errors on its node's interfaces")
    is_reported = resent.is_reported or errors.is_reported
    return RuleResult(
        subject="network", is_reported=is_reported, causes=(*resent.causes, *errors.causes)
    )


def fabric(symptoms: Symptoms) -> RuleResult:
    """Find ports of the fabric that are down, and errors on its links."""

    def down(sample: HostSample) -> float | None:
        if sample.fabric_ports is None or sample.fabric_ports_up is None:
            return None
        return sample.fabric_ports - sample.fabric_ports_up

    def words(worst: float) -> str:
        return f"{worst:.0f} fabric ports of its node are down"

    kind = CauseKind.NETWORK
    ports = _if_above_limit(symptoms, "fabric", down, 0.0, words, Tier.PROBABLE, kind)
    errors = _if_grown(symptoms, "fabric", "fabric_errors", "errors on its node's fabric links")
    is_reported = ports.is_reported or errors.is_reported
    return RuleResult(
        subject="fabric", is_reported=is_reported, causes=(*ports.causes, *errors.causes)
    )


def run_queue(symptoms: Symptoms) -> RuleResult:
    """Find time in which the rank's thread was runnable and waited for a core."""

    def share(thread: ThreadTime) -> float | None:
        if thread.run_queue_s is None:
            return None
        whole_s = thread.compute_s + thread.run_queue_s
        return thread.run_queue_s / whole_s if whole_s > 0.0 else 0.0

    return _if_time_lost(
        symptoms, "run-queue wait", share, CauseKind.CORE_TAKEN, "waited for a core", Tier.PROBABLE
    )


def stall(symptoms: Symptoms) -> RuleResult:
    """Find time in which the thread neither ran nor was runnable: stopped, swapped out, on I/O.

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
    is_enough = slowdown is not None and made**2 >= slowdown
    return _if_time_lost(
        symptoms,
        "stall",
        share,
        CauseKind.FROZEN,
        "stood still (stopped, swapped out or waiting for storage)",
        Tier.CONFIRMED if is_enough else Tier.PROBABLE,
    )


def _pressure(
    symptoms: Symptoms, subject: str, reading: _Reading, what: str, most: Tier
) -> RuleResult:
    def words(worst: float) -> str:
        return f"{what} {worst:.0%} of the time"

    return _if_above_limit(symptoms, subject, reading, PRESSED_RATIO, words, most)


def _if_above_limit(
    symptoms: Symptoms,
    subject: str,
    reading: _Reading,
    limit: float,
    words: Callable[[float], str],
    most: Tier,
    kind: CauseKind = CauseKind.HOST,
) -> RuleResult:
    """Return a cause if the worst sample is above the limit and other nodes stay below it."""

    def worst_of(window: HostWindow) -> float | None:
        return max(measured_values([reading(sample) for sample in window.during]), default=None)

    return _above(symptoms, subject, worst_of, limit, words, most, kind)


def _if_grown(symptoms: Symptoms, subject: str, field: str, what: str) -> RuleResult:
    """Return a cause if a counter of the node grew since the onset and other nodes' did not."""

    def growth_of(window: HostWindow) -> float | None:
        return grown([getattr(sample, field) for sample in window.since_before])

    def words(worst: float) -> str:
        return f"{worst:.0f} new {what}"

    kind = CauseKind.NETWORK
    return _above(symptoms, subject, growth_of, 0.0, words, Tier.SUSPECTED, kind)


def _above(
    symptoms: Symptoms,
    subject: str,
    worst_of: _Worst,
    limit: float,
    words: Callable[[float], str],
    most: Tier,
    kind: CauseKind,
) -> RuleResult:
    mine = None if symptoms.host is None else worst_of(symptoms.host)
    if mine is None:
        return RuleResult(subject=subject, is_reported=False)
    among = compare_with_peers(
        symptoms.peer_hosts, lambda host: None if (w := worst_of(host)) is None else w > limit
    )
    neighbours = symptoms.neighbours
    is_shared = neighbours > 0 and not among.reported  # all other ranks with it are healthy
    if mine <= limit or among.is_refuted or is_shared:
        return RuleResult(subject=subject)
    if among.reported:
        others = f"{among.shared or 'none'} of {among.reported} other nodes"
    else:
        others = "no other node to compare with"
    are = "rank is" if neighbours == 1 else "ranks are"
    healthy = f", though {neighbours} healthy {are} on it too" if neighbours else ""
    cause = Cause(
        kind=kind,
        sure=lower(among.sure(most)) if neighbours else among.sure(most),
        words=f"{words(mine)} ({others}{healthy})",
    )
    return RuleResult(subject=subject, causes=(cause,))


def _if_time_lost(
    symptoms: Symptoms,
    subject: str,
    share: Callable[[ThreadTime], float | None],
    kind: CauseKind,
    what: str,
    most: Tier,
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
    cause = Cause(kind=kind, sure=among.sure(most), words=words)
    return RuleResult(subject=subject, causes=(cause,))
