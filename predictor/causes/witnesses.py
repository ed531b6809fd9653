"""Whom to ask why a rank is slow, and what they showed; for live jobs and recorded ones. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pacekeeper.core.telemetry.samples import DeviceSample, HostSample
from pacekeeper.predictor.causes.evidence import DeviceWindow, HostWindow, Symptoms, ThreadTime

PEERS = 8  # on the node itself, and as many on others


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a rank sits. Ranks of one `role` do the same work."""

    role: str
    node: str
    device_uuid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWindow:
    """What was sampled on one node around the onset, and the onset on its clock.

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
    """What a slow rank showed, beside peers that are not slow. `seats`: of all of them."""
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
