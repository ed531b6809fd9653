"""Samples of a rank's device, host and thread around an onset, compared with its peers'. Pure.

Times are of each sample's own node and compared with the onset on that node only.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Generic, TypeVar

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.core.telemetry.samples import DeviceSample, HostSample

SLACK_S = 2.0  # a sample this much before the onset still shows it: sampled each second, rounded
BUSY_RATIO = 0.5  # below it a device saves power: its clocks and its link say nothing
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
    LOST = "lost"  # the device answers no more
    NETWORK = "network"
    STARVED = "starved"  # the device waits for its host
    FROZEN = "frozen"  # the thread neither ran nor wanted to
    CORE_TAKEN = "core_taken"  # the thread wanted to run, its core was someone else's
    HOST = "host"
    UNKNOWN = "unknown"  # nothing was seen; the words say where was looked


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """An observation that would explain a slow rank, or (kind UNKNOWN) that there was none.

    Attributes:
        not_seen: signals that would prove or show it and were not reported.
        normal: of kind UNKNOWN: the signals that were examined and not unusual.
    """

    kind: CauseKind
    sure: Tier
    words: str
    not_seen: tuple[str, ...] = ()
    normal: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleResult:
    """The causes that one rule found; `is_reported` is False where its signal is missing."""

    subject: str
    is_reported: bool = True
    causes: tuple[Cause, ...] = ()


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
        """Samples since the onset and the last one before it: counters grow between them."""
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
        """The model of the device; empty: not known."""
        return self.samples[-1].name if self.samples else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWindow(_Window[HostSample]):
    """Samples of one node's kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadTime:
    """Where one rank's thread spent the newest step. None: its clock does not report it."""

    compute_s: float
    run_queue_s: float | None = None
    stall_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptoms:
    """All that is known of a slow rank and of ranks of the same role that are not slow.

    `slowdown` is what is to be explained, observed / expected time (None: not known);
    `neighbours` counts those on its own node; `peer_hosts` are the nodes of the others.
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
        """Peers with a device of the same model: others have other clocks, limits and links."""
        own = "" if self.device is None else self.device.model
        return tuple(peer for peer in self.peers if peer.model == own)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerComparison:
    """How many peers report the same reading, and how many of them show what the slow one shows."""

    reported: int
    shared: int

    @property
    def is_refuted(self) -> bool:
        """Whether half or more of the peers, which are not slow, show it too: it is no cause."""
        return self.shared > 0 and 2 * self.shared >= self.reported

    @property
    def words(self) -> str:
        if not self.reported:
            return "no peer to compare with"
        return f"{self.shared or 'none'} of {self.reported} peers"

    def sure(self, most: Tier) -> Tier:
        """Return `most` if a peer reports the reading, else one tier less."""
        return most if self.reported else lower(most)


def compare_with_peers(peers: Sequence[T], shares: Callable[[T], bool | None]) -> PeerComparison:
    """Count peers that share a reading. `shares` returns None for one that did not report it."""
    answers = [answer for peer in peers if (answer := shares(peer)) is not None]
    return PeerComparison(reported=len(answers), shared=sum(answers))


def apply_rule(
    symptoms: Symptoms,
    subject: str,
    reading: Callable[[DeviceWindow], T | None],
    *,
    is_alike: Callable[[T, T], bool],
    causes: Callable[[T, Sequence[T], PeerComparison], Sequence[Cause]],
) -> RuleResult:
    """Compare one reading of the device with its peers'; `reading` returns None if not reported.

    is_alike(a peer's, its own): the peer, which is not slow, shows it too. `causes` is asked, with
    its own, the peers' and how many of them share it, unless they refute it.
    """
    own = None if symptoms.device is None else reading(symptoms.device)
    if own is None:
        return RuleResult(subject=subject, is_reported=False)
    theirs = measured_values([reading(peer) for peer in symptoms.alike])
    among = compare_with_peers(theirs, lambda one: is_alike(one, own))
    found = () if among.is_refuted else tuple(causes(own, theirs, among))
    return RuleResult(subject=subject, causes=found)


def counted(
    symptoms: Symptoms,
    subject: str,
    what: str,
    growth: Callable[[DeviceWindow], int | None],
    kind: CauseKind,
    most: Tier,
) -> RuleResult:
    """Find growth of a device counter since the onset that its peers do not show."""

    def causes(mine: int, _: Sequence[int], among: PeerComparison) -> Sequence[Cause]:
        if mine <= 0:
            return ()
        words = f"{mine} new {what} ({among.words})"
        return (Cause(kind=kind, sure=among.sure(most), words=words),)

    return apply_rule(symptoms, subject, growth, is_alike=lambda peers, _: peers > 0, causes=causes)


def lower(tier: Tier) -> Tier:
    """The next tier below; the lowest stays."""
    return Tier.PROBABLE if tier is Tier.CONFIRMED else Tier.SUSPECTED


def is_surer(tier: Tier, other: Tier) -> bool:
    """Strictly."""
    order = (Tier.SUSPECTED, Tier.PROBABLE, Tier.CONFIRMED)
    return order.index(tier) > order.index(other)


def grown(counts: Sequence[int | None]) -> int | None:
    """Return the increments of a counter, oldest first; None: reported less than twice.

    One that began anew, as after a restart of a driver, has grown since then only.
    """
    known = measured_values(counts)
    if len(known) < 2:
        return None
    return sum(max(0, after - before) for before, after in pairwise(known))


def measured_values(values: Sequence[T | None]) -> list[T]:
    """Return the values that were measured."""
    return [value for value in values if value is not None]


PEERS = 8  # on the node itself, and as many on others


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
    """Ranks of the same role among `others`: neighbours, and some of other nodes."""
    near: list[int] = []
    far: dict[str, list[int]] = {}
    for rank, seat in others:
        if seat.role != own.role:
            continue
        if seat.node == own.node:
            near.append(rank)
        else:
            far.setdefault(seat.node, []).append(rank)
    # One of each node first: hosts are compared too.
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
    others.pop(own.device_uuid, None)  # two ranks on one device are no witnesses of each other
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
