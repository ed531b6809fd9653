"""Samples of a rank's device, host and thread around an onset, compared with its peers'.

Sample times are on the clock of their node and compared with the onset on that node only.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import median
from typing import Any, Generic, TypeVar

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.core.telemetry.samples import DeviceSample, HostSample

SLACK_S = 2.0  # a sample this much before the onset still shows it: sampled each second, rounded
BUSY_RATIO = 0.5  # below it a device saves power: clock rates and link state are not evidence
IDLE = 0x1  # NVML clock event: nothing runs on the device

S = TypeVar("S", DeviceSample, HostSample)
T = TypeVar("T")


class CauseKind(StrEnum):
    THERMAL = "thermal"
    POWER = "power"
    CLOCKS = "clocks"
    PCIE = "pcie"
    MEMORY_ERRORS = "memory_errors"
    FOREIGN_PROCESS = "foreign_process"
    NVLINK = "nvlink"
    DRIVER = "driver"
    LOST = "lost"  # the device no longer responds
    NETWORK = "network"
    STARVED = "starved"  # the device waits for its host
    STALLED = "stalled"  # the thread neither ran nor was runnable
    CORE_TAKEN = "core_taken"  # the thread was runnable, another task had its core
    HOST = "host"
    UNKNOWN = "unknown"  # no cause found; the text lists the missing samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """An observation that would explain a slow rank, or (kind UNKNOWN) the absence of any.

    Attributes:
        not_seen: signals that would prove or show it and were not reported.
        normal: for kind UNKNOWN, the signals that were examined and not unusual.
    """

    kind: CauseKind
    sure: Tier
    words: str
    not_seen: tuple[str, ...] = ()
    normal: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleResult:
    """The causes that one rule found; `is_reported` is False if its signal is missing."""

    subject: str
    is_reported: bool = True
    causes: tuple[Cause, ...] = ()


def found(subject: str, kind: CauseKind, sure: Tier, words: str) -> RuleResult:
    """Return the result of a rule that found one cause."""
    return RuleResult(subject=subject, causes=(Cause(kind=kind, sure=sure, words=words),))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window(Generic[S]):
    """Samples of one node, oldest first, and the onset on its clock."""

    onset_s: float
    samples: tuple[S, ...] = ()

    @property
    def during(self) -> tuple[S, ...]:
        """Samples since the onset."""
        return tuple(s for s in self.samples if s.sampled_s >= self.onset_s - SLACK_S)

    @property
    def since_before(self) -> tuple[S, ...]:
        """Samples since the onset, preceded by the last one before it: counters grow in between."""
        during = self.during
        return self.samples[-len(during) - 1 :] if during else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWindow(_Window[DeviceSample]):
    """Samples of one device; `pids` are the processes of the job on that node."""

    pids: frozenset[int] = frozenset()

    @property
    def busy(self) -> tuple[DeviceSample, ...]:
        """Samples since the onset under load, or whose load is not reported."""
        return tuple(
            s
            for s in self.during
            if not (s.clock_event_reasons or 0) & IDLE
            and (s.utilisation_ratio is None or s.utilisation_ratio >= BUSY_RATIO)
        )

    @property
    def model(self) -> str:
        """The model of the device; empty if unknown."""
        return self.samples[-1].name if self.samples else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWindow(_Window[HostSample]):
    """Samples of one node's kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadTime:
    """Times of one rank's thread in the newest step, None if its clock does not report them."""

    compute_s: float
    run_queue_s: float | None = None
    stall_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptoms:
    """Observations of a slow rank and of ranks of the same role that are not slow.

    Attributes:
        slowdown: observed / expected time, which is to be explained; None: unknown.
        peers: devices of the peers.
        neighbours: number of peers on the rank's own node.
        peer_hosts: the nodes of the other peers.
    """

    slowdown: float | None = None
    device: DeviceWindow | None = None
    peers: tuple[DeviceWindow, ...] = ()
    host: HostWindow | None = None
    neighbours: int = 0
    peer_hosts: tuple[HostWindow, ...] = ()
    thread: ThreadTime | None = None
    peer_threads: tuple[ThreadTime, ...] = ()

    @property
    def alike(self) -> tuple[DeviceWindow, ...]:
        """Peers with the same model of device: other models have other clocks, limits and links."""
        own = "" if self.device is None else self.device.model
        return tuple(peer for peer in self.peers if peer.model == own)


Rule = Callable[[Symptoms], RuleResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerComparison:
    """Number of peers that report a reading, and how many of them share the slow rank's value."""

    reported: int
    shared: int

    @property
    def is_refuted(self) -> bool:
        """Whether at least half of the peers share it: they are not slow, so it is no cause."""
        return self.shared > 0 and 2 * self.shared >= self.reported

    @property
    def words(self) -> str:
        if not self.reported:
            return "no peer to compare with"
        return f"{self.shared or 'none'} of {self.reported} peers"

    def sure(self, most: Tier) -> Tier:
        """Return `most` if a peer reports the reading, else the next lower tier."""
        return most if self.reported else lower(most)


def compare_with_peers(theirs: Iterable[T | None], shares: Callable[[T], bool]) -> PeerComparison:
    """Count the peers' readings, None if not reported, and those that share the slow rank's."""
    answers = [shares(one) for one in theirs if one is not None]
    return PeerComparison(reported=len(answers), shared=sum(answers))


def shown(
    subject: str,
    kind: CauseKind,
    most: Tier,
    read: Callable[[DeviceWindow], Any],
    words: str,
    *,
    is_bad: Callable[[Any], bool] = bool,
    needs_peers: bool = False,
) -> Rule:
    """Make a rule: what a device shows is a cause unless half of its peers show it, too.

    Args:
        subject: name of the signal; several rules may share one.
        kind: of the cause.
        most: its highest tier.
        read: returns the reading of a device; None: not reported.
        words: of the cause, with fields `mine` (the reading) and `among` (how many peers).
        is_bad: whether a reading is a cause.
        needs_peers: whether it is no cause without a peer to compare with.
    """

    def rule(symptoms: Symptoms) -> RuleResult:
        own = None if symptoms.device is None else read(symptoms.device)
        if own is None:
            return RuleResult(subject=subject, is_reported=False)
        among = compare_with_peers(map(read, symptoms.alike), is_bad)
        if not is_bad(own) or among.is_refuted or (needs_peers and not among.reported):
            return RuleResult(subject=subject)
        return found(subject, kind, among.sure(most), words.format(mine=own, among=among.words))

    return rule


def unlike(
    subject: str,
    kind: CauseKind,
    most: Tier,
    read: Callable[[DeviceWindow], float | None],
    words: str,
    *,
    is_alike: Callable[[float, float], bool],
    usual: Callable[[DeviceWindow], float | None] = lambda _: None,
    alone: str = "",
) -> Rule:
    """Make a rule: a reading is a cause if it is unlike most peers', or unlike what is usual.

    Args:
        subject, kind, most, read, words: as in `shown`; fields of `words` are also `usual` (the
            peers' median) and `times` (usual / mine).
        is_alike: (usual or a peer's reading, the device's) -> whether they are alike.
        usual: returns the reading to compare with if there is no peer; None: none.
        alone: the words without a peer.
    """

    def rule(symptoms: Symptoms) -> RuleResult:
        own = None if symptoms.device is None else read(symptoms.device)
        if symptoms.device is None or own is None:
            return RuleResult(subject=subject, is_reported=False)
        theirs = measured_values([read(peer) for peer in symptoms.alike])
        among = compare_with_peers(theirs, lambda one: is_alike(one, own))
        middle = median(theirs) if theirs else usual(symptoms.device)
        if middle is None or among.is_refuted or (not theirs and is_alike(middle, own)):
            return RuleResult(subject=subject)
        text = (words if theirs else alone).format(
            mine=own, usual=middle, times=middle / max(own, 1.0), among=among.words
        )
        return found(subject, kind, among.sure(most), text)

    return rule


def lower(tier: Tier) -> Tier:
    """Return the next lower tier; SUSPECTED remains."""
    return Tier.PROBABLE if tier is Tier.CONFIRMED else Tier.SUSPECTED


def is_surer(tier: Tier, other: Tier) -> bool:
    """Return whether `tier` is strictly more certain than `other`."""
    return list(Tier).index(tier) > list(Tier).index(other)


def grown(counts: Sequence[int | None]) -> int | None:
    """Return the increments of a counter, oldest first; None: reported less than twice.

    A decrease is a reset, as after a restart of the driver, and counts as no growth.
    """
    known = measured_values(counts)
    if len(known) < 2:
        return None
    return sum(max(0, after - before) for before, after in pairwise(known))


def measured_values(values: Sequence[T | None]) -> list[T]:
    """Return the values that were measured."""
    return [value for value in values if value is not None]


PEERS = 8  # maximum on the rank's own node, and on other nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The node, device and role of a rank. Ranks of one `role` do the same work."""

    role: str
    node: str
    device_uuid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWindow:
    """Samples of one node around the onset, and the onset on its clock.

    `pids` are the processes of the job on that node.
    """

    onset_s: float
    devices: Mapping[str, Sequence[DeviceSample]]  # by uuid, oldest first
    host: Sequence[HostSample] = ()
    pids: frozenset[int] = frozenset()


def peers_of(own: Seat, others: Iterable[tuple[int, Seat]]) -> tuple[int, ...]:
    """Return ranks of the same role among `others`: on the same node, and some on other nodes."""
    near: list[int] = []
    far: dict[str, list[int]] = {}
    for rank, seat in others:
        if seat.role != own.role:
            continue
        if seat.node == own.node:
            near.append(rank)
        else:
            far.setdefault(seat.node, []).append(rank)
    # One rank of each node first, because hosts are compared too.
    by_turn = sorted((turn, rank) for ranks in far.values() for turn, rank in enumerate(ranks))
    return (*near[:PEERS], *(rank for _, rank in by_turn[:PEERS]))


def symptoms_of(
    rank: int,
    peers: Collection[int],
    *,
    seats: Mapping[int, Seat],
    nodes: Mapping[str, NodeWindow],
    threads: Mapping[int, ThreadTime],
    slowdown: float | None,
) -> Symptoms:
    """Collect the symptoms of a slow rank and of peers that are not slow. `seats`: of all ranks."""
    own = seats[rank]
    others = {seats[peer].device_uuid: seats[peer] for peer in peers}
    others.pop(own.device_uuid, None)  # two ranks on one device are no reference for each other
    windows = [_device(nodes, seat) for seat in others.values()]
    names = sorted({seats[peer].node for peer in peers} - {own.node})
    hosts = [_host(nodes, name) for name in names]
    return Symptoms(
        slowdown=slowdown,
        device=_device(nodes, own),
        peers=tuple(window for window in windows if window is not None),
        host=_host(nodes, own.node),
        neighbours=sum(seats[peer].node == own.node for peer in peers),
        peer_hosts=tuple(window for window in hosts if window is not None),
        thread=threads.get(rank),
        peer_threads=tuple(threads[peer] for peer in peers if peer in threads),
    )


def _device(nodes: Mapping[str, NodeWindow], seat: Seat) -> DeviceWindow | None:
    node = nodes.get(seat.node)
    if node is None or seat.device_uuid not in node.devices:
        return None
    samples = tuple(node.devices[seat.device_uuid])
    return DeviceWindow(onset_s=node.onset_s, samples=samples, pids=node.pids)


def _host(nodes: Mapping[str, NodeWindow], name: str) -> HostWindow | None:
    node = nodes.get(name)
    if node is None or not node.host:
        return None
    return HostWindow(onset_s=node.onset_s, samples=tuple(node.host))
