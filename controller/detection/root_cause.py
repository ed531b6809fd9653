"""What the nodes saw lately, kept in short windows, and what it says of a finding. Pure.

Windows lie on each node's own clock. The onset is put onto it: the end of the step in which the
finding was made, as ranks of that node told it, less the duration of the steps since the onset;
where they tell no times, the newest sample stands for that end. Some readings come late (NVML's
costly ones each 30 s): for a while it is looked again, and what is surer replaces what was said.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from pacekeeper.controller.detection import incidents
from pacekeeper.controller.state.events import Command
from pacekeeper.controller.state.job_parts import CauseSearch, Place, StepDraft
from pacekeeper.controller.state.state import JobState, NodeState, RankStatus, State
from pacekeeper.core.incidents.findings import Finding, Tier
from pacekeeper.core.telemetry.node_report import AgentHealth, NodeReport
from pacekeeper.core.telemetry.records import MicroBatchRecord
from pacekeeper.core.telemetry.samples import DeviceSample, HostSample
from pacekeeper.predictor.causes.evidence import (
    Cause,
    NodeWindow,
    Seat,
    Symptoms,
    ThreadTime,
    peers_of,
    symptoms_of,
)
from pacekeeper.predictor.causes.explain import explain, is_explained

KEPT_SAMPLES = 12  # of one device or host: a minute; each costs some 400 bytes
SPACING_S = 5.0
KEPT_DEVICES = 64  # of one node
LOOK_AGAIN_S = 90.0
MAX_SEARCHES = 16  # at a time: what strikes more ranks at once is not of a device
_HEIGHT = {None: 0, Tier.SUSPECTED: 1, Tier.PROBABLE: 2, Tier.CONFIRMED: 3}


class _Sampled(Protocol):
    @property
    def sampled_s(self) -> float: ...


S = TypeVar("S", bound=_Sampled)


def store_samples(node: NodeState, report: NodeReport, now_s: float) -> NodeState:
    """Put a report's samples into the node's windows, as they came: most are never looked at."""
    unread = report.unread
    if unread is None:
        devices, host = _with(node.devices, node.host, report.devices, report.host)
        return replace(node, devices=devices, host=host, health=report.health, last_report_s=now_s)
    # In every report, and looked at in nearly none: the newest stands by itself, and only those
    # that are far enough apart are kept.
    window, before = node.unread_host, node.newest
    if before is not None and _is_apart(window, before) and (told := before.host) is not None:
        window = append_sample(window, told)
    later = unread.devices
    # Not by `replace`, which costs more than all the rest: this is done for each report of a fleet.
    return NodeState(
        name=node.name,
        agent_incarnation=node.agent_incarnation,
        product_version=node.product_version,
        rack=node.rack,
        is_connected=node.is_connected,
        health=node.health,
        devices=node.devices,
        host=node.host,
        unread_devices=node.unread_devices
        if later is None
        else append_sample(node.unread_devices, later),
        unread_host=window,
        newest=unread,
        last_report_s=now_s,
    )


def health_of(node: NodeState) -> AgentHealth:
    """What its agent said of itself last."""
    return node.health if node.newest is None else node.newest.health()


def windows(
    node: NodeState,
) -> tuple[Mapping[str, tuple[DeviceSample, ...]], tuple[HostSample, ...]]:
    """All that is kept of a node's devices and host, read by now. O(what is kept)."""
    devices, host = node.devices, node.host
    for later in node.unread_devices:
        devices, host = _with(devices, host, later.read(), None)
    newest = None if node.newest is None else node.newest.host
    for one in (*node.unread_host, *([] if newest is None else [newest])):
        devices, host = _with(devices, host, (), one.read())
    return devices, host


def _is_apart(window: Sequence[_Sampled], sample: _Sampled) -> bool:
    """Is it far enough from the newest of these, or of a clock that began anew?"""
    if not window:
        return True
    return not 0.0 <= sample.sampled_s - window[-1].sampled_s < SPACING_S


def _with(
    devices: Mapping[str, tuple[DeviceSample, ...]],
    host: tuple[HostSample, ...],
    sampled: Sequence[DeviceSample],
    sampled_host: HostSample | None,
) -> tuple[Mapping[str, tuple[DeviceSample, ...]], tuple[HostSample, ...]]:
    """Windows with newer samples. O(devices of the node)."""
    if sampled:
        devices = dict(devices)
        for sample in sampled:
            devices[sample.device_uuid] = append_sample(devices.get(sample.device_uuid, ()), sample)
        if len(devices) > KEPT_DEVICES:
            named = {sample.device_uuid for sample in sampled}
            devices = {uuid: window for uuid, window in devices.items() if uuid in named}
    return devices, host if sampled_host is None else append_sample(host, sampled_host)


def append_sample(window: tuple[S, ...], sample: S) -> tuple[S, ...]:
    """The window with a newer sample: samples SPACING_S apart, and the newest of all.

    An agent repeats its newest sample in each report, and tells late what it could not send: that
    changes nothing. A sample from before the whole window is of a clock that began anew.
    """
    if not window or sample.sampled_s < window[0].sampled_s:
        return (sample,)
    if sample.sampled_s <= window[-1].sampled_s:
        return window
    is_close = len(window) > 1 and window[-1].sampled_s - window[-2].sampled_s < SPACING_S
    return (*(window[:-1] if is_close else window), sample)[-KEPT_SAMPLES:]


def explained(
    state: State, job: JobState, finding: Finding, draft: StepDraft, unix_s: float
) -> tuple[JobState, Finding]:
    """The finding with its cause in words, and a search that goes on unless that is certain."""
    slow = finding.rank
    assert slow is not None, "causes are looked for of ranks"
    searches = {rank: s for rank, s in job.detection.searches.items() if rank != slow}
    if len(searches) >= MAX_SEARCHES:
        return job, replace(finding, cause="not looked for: too many ranks are slow at once")
    search = _begun(state, job, slow, finding, draft, unix_s)
    causes = explain(_symptoms(state, job, slow, search, draft))
    search = replace(search, sure=_surest(causes))
    if search.sure is not Tier.CONFIRMED:
        searches[slow] = search
    job = replace(job, detection=replace(job.detection, searches=searches))
    return job, incidents.with_cause(finding, causes)


def look_again(
    state: State, job: JobState, draft: StepDraft, unix_s: float
) -> tuple[JobState, list[Command]]:
    """Name what is seen by now of open findings, where it is surer than what was said."""
    commands: list[Command] = []
    searches = {}
    for rank, search in job.detection.searches.items():
        if unix_s > search.until_unix_s or rank not in job.detection.evidence.slow:
            continue
        causes = explain(_symptoms(state, job, rank, search, draft))
        sure = _surest(causes)
        if _HEIGHT[sure] > _HEIGHT[search.sure]:
            search = replace(search, sure=sure)
            job, said = incidents.name_cause(job, rank, causes)
            commands += said
        if sure is not Tier.CONFIRMED:
            searches[rank] = search
    return replace(
        job, detection=replace(job.detection, searches=searches)
    ) if job.detection.searches else job, commands


def _begun(
    state: State,
    job: JobState,
    slow: int,
    finding: Finding,
    draft: StepDraft,
    unix_s: float,
) -> CauseSearch:
    """Whom to compare with, and the onset on the clock of each of their nodes."""
    peers = _peers(job, slow)
    involved = (slow, *peers)
    span_s = _span_s(job, finding)
    names = {job.ranks[rank].node for rank in involved}
    pids: dict[str, set[int]] = {name: set() for name in names}
    for known in job.ranks.values():
        if known.node in pids:
            pids[known.node].add(known.attachment.pid)
    places = {}
    for name in names:
        own = [rank for rank in involved if job.ranks[rank].node == name]
        end_s = _end_s(own, draft) or _newest_s(state.nodes.get(name))
        places[name] = Place(onset_s=end_s - span_s, pids=frozenset(pids[name]))
    return CauseSearch(peers=peers, places=places, until_unix_s=unix_s + LOOK_AGAIN_S)


def _peers(job: JobState, rank: int) -> tuple[int, ...]:
    """Ranks of the same role that run and are not slow."""
    others = (
        other for other in job.living if other != rank and other not in job.detection.evidence.slow
    )
    return peers_of(_seat(job, rank), ((other, _seat(job, other)) for other in others))


def _seat(job: JobState, rank: int) -> Seat:
    known = job.ranks[rank]
    own = known.attachment
    return Seat(role=own.role, node=known.node, device_uuid=own.device_uuid)


def _symptoms(
    state: State, job: JobState, rank: int, search: CauseSearch, draft: StepDraft
) -> Symptoms:
    peers = [
        peer
        for peer in search.peers
        if peer not in job.detection.evidence.slow
        and peer in job.ranks
        and job.ranks[peer].status is RankStatus.ALIVE
    ]
    nodes = {}
    for name, place in search.places.items():
        if name in state.nodes:
            devices, host = windows(state.nodes[name])
            nodes[name] = NodeWindow(
                onset_s=place.onset_s, devices=devices, host=host, pids=place.pids
            )
    involved = (rank, *peers)
    threads = {one: time for one in involved if (time := _thread(draft.work_of(one))) is not None}
    return symptoms_of(
        rank,
        peers,
        seats={one: _seat(job, one) for one in involved},
        nodes=nodes,
        threads=threads,
        slowdown=job.detection.evidence.slow.get(rank),
    )


def _thread(done: Sequence[MicroBatchRecord]) -> ThreadTime | None:
    """Where the thread spent the step, all micro-batches together."""
    if not done:
        return None
    return ThreadTime(
        compute_s=sum(record.compute_s for record in done),
        run_queue_s=_sum([record.run_queue_s for record in done]),
        stall_s=_sum([record.stall_s for record in done]),
    )


def _sum(values: Sequence[float | None]) -> float | None:
    told = [value for value in values if value is not None]
    return sum(told) if len(told) == len(values) else None


def _span_s(job: JobState, finding: Finding) -> float:
    """How long the steps from the onset to the finding took; the mean for those not kept."""
    count = finding.step - finding.onset_step + 1
    last = job.progress.recent_step_s[-count:]
    return sum(last) / len(last) * count if last else 0.0


def _end_s(ranks: Collection[int], draft: StepDraft) -> float:
    """When these ranks ended the step, on their node's clock; 0.0: they do not tell."""
    ends = [0.0]
    for rank in ranks:
        ends += [record.ended_mono_s for record in draft.work_of(rank)]
        end = draft.ends.get(rank)
        ends += [] if end is None else [end.ended_mono_s]
    return max(ends)


def _newest_s(node: NodeState | None) -> float:
    if node is None:
        return 0.0
    devices, host = windows(node)
    ends_s = [window[-1].sampled_s for window in devices.values() if window]
    ends_s += [sample.sampled_s for sample in host[-1:]]
    return max(ends_s, default=0.0)


def _surest(causes: Sequence[Cause]) -> Tier | None:
    """None: nothing was seen."""
    return causes[0].sure if is_explained(causes) else None
