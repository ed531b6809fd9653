"""Root cause of a finding, from recent device and host samples of the nodes. Pure.

Samples are kept in short windows on each node's own clock. The onset on that clock is the end of
the step of the finding, as ranks of the node report it, minus the duration of the steps since the
onset; where they report no end, the newest sample replaces it. Some samples arrive late (NVML's
slow queries run every 30 s): the search is repeated for `SEARCH_S`, and a more certain cause
replaces the reported one. Called by `machine.py` with each report, and by `machine/steps.py`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from pacekeeper.controller.detection import incidents
from pacekeeper.controller.state.events import Command
from pacekeeper.controller.state.job_parts import CauseSearch, NodeOnset, StepDraft
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
SEARCH_S = 90.0  # from the finding on
MAX_SEARCHES = 16  # at a time: a fault of more ranks at once is not of a device
_CERTAINTY = {None: 0, Tier.SUSPECTED: 1, Tier.PROBABLE: 2, Tier.CONFIRMED: 3}


class _Sampled(Protocol):
    @property
    def sampled_s(self) -> float: ...


S = TypeVar("S", bound=_Sampled)


def store_samples(node: NodeState, report: NodeReport, now_s: float) -> NodeState:
    """Add a report's samples to the node's windows; they are decoded only when needed."""
    unread = report.unread
    if unread is None:
        devices, host = _with(node.devices, node.host, report.devices, report.host)
        return replace(node, devices=devices, host=host, health=report.health, last_report_s=now_s)
    # Every report has samples and few are ever decoded: the newest is kept apart, and the window
    # takes only samples that are far enough apart.
    window, before = node.unread_host, node.newest
    if before is not None and _is_apart(window, before) and (told := before.host) is not None:
        window = append_sample(window, told)
    later = unread.devices
    # Without `replace`, which would cost more than all the rest: this runs for every report.
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
    """Return the health that the node's agent reported last."""
    return node.health if node.newest is None else node.newest.health()


def windows(
    node: NodeState,
) -> tuple[Mapping[str, tuple[DeviceSample, ...]], tuple[HostSample, ...]]:
    """Return the decoded windows of a node: samples by device, and of the host. O(samples)."""
    devices, host = node.devices, node.host
    for later in node.unread_devices:
        devices, host = _with(devices, host, later.read(), None)
    newest = None if node.newest is None else node.newest.host
    for one in (*node.unread_host, *([] if newest is None else [newest])):
        devices, host = _with(devices, host, (), one.read())
    return devices, host


def _is_apart(window: Sequence[_Sampled], sample: _Sampled) -> bool:
    """Whether the sample is far enough from the newest of the window, or its clock restarted."""
    if not window:
        return True
    return not 0.0 <= sample.sampled_s - window[-1].sampled_s < SPACING_S


def _with(
    devices: Mapping[str, tuple[DeviceSample, ...]],
    host: tuple[HostSample, ...],
    sampled: Sequence[DeviceSample],
    sampled_host: HostSample | None,
) -> tuple[Mapping[str, tuple[DeviceSample, ...]], tuple[HostSample, ...]]:
    """Return the windows with newer samples added. O(devices of the node)."""
    if sampled:
        devices = dict(devices)
        for sample in sampled:
            devices[sample.device_uuid] = append_sample(devices.get(sample.device_uuid, ()), sample)
        if len(devices) > KEPT_DEVICES:
            named = {sample.device_uuid for sample in sampled}
            devices = {uuid: window for uuid, window in devices.items() if uuid in named}
    return devices, host if sampled_host is None else append_sample(host, sampled_host)


def append_sample(window: tuple[S, ...], sample: S) -> tuple[S, ...]:
    """Return the window with a newer sample: samples `SPACING_S` apart, and the newest one.

    Repeated and late samples have no effect. A sample from before the whole window is of a clock
    that restarted, and starts a new window.
    """
    if not window or sample.sampled_s < window[0].sampled_s:
        return (sample,)
    if sample.sampled_s <= window[-1].sampled_s:
        return window
    is_close = len(window) > 1 and window[-1].sampled_s - window[-2].sampled_s < SPACING_S
    return (*(window[:-1] if is_close else window), sample)[-KEPT_SAMPLES:]


def explain_finding(
    state: State, job: JobState, finding: Finding, draft: StepDraft, unix_s: float
) -> tuple[JobState, Finding]:
    """Add the cause to a rank's finding, and keep the search open unless the cause is certain.

    Args:
        state: The controller's state, with the samples of the nodes.
        job: The job of the rank.
        finding: The finding, of a rank.
        draft: The records of the step of the finding.
        unix_s: The time now.
    """
    slow = finding.rank
    assert slow is not None, "causes are determined for ranks"
    searches = {rank: s for rank, s in job.detection.searches.items() if rank != slow}
    if len(searches) >= MAX_SEARCHES:
        return job, replace(finding, cause="not determined: too many ranks are slow at once")
    search = _start_search(state, job, slow, finding, draft, unix_s)
    causes = explain(_symptoms(state, job, slow, search, draft))
    search = replace(search, sure=_surest(causes))
    if search.sure is not Tier.CONFIRMED:
        searches[slow] = search
    job = replace(job, detection=replace(job.detection, searches=searches))
    return job, incidents.with_cause(finding, causes)


def repeat_searches(
    state: State, job: JobState, draft: StepDraft, unix_s: float
) -> tuple[JobState, list[Command]]:
    """Repeat the open searches, and report each cause that is more certain than the last one."""
    commands: list[Command] = []
    searches = {}
    for rank, search in job.detection.searches.items():
        if unix_s > search.until_unix_s or rank not in job.detection.evidence.slow:
            continue
        causes = explain(_symptoms(state, job, rank, search, draft))
        sure = _surest(causes)
        if _CERTAINTY[sure] > _CERTAINTY[search.sure]:
            search = replace(search, sure=sure)
            job, said = incidents.name_cause(job, rank, causes)
            commands += said
        if sure is not Tier.CONFIRMED:
            searches[rank] = search
    return replace(
        job, detection=replace(job.detection, searches=searches)
    ) if job.detection.searches else job, commands


def _start_search(
    state: State,
    job: JobState,
    slow: int,
    finding: Finding,
    draft: StepDraft,
    unix_s: float,
) -> CauseSearch:
    """Start a search: the peers to compare with, and the onset on the clock of each node."""
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
        places[name] = NodeOnset(onset_s=end_s - span_s, pids=frozenset(pids[name]))
    return CauseSearch(peers=peers, places=places, until_unix_s=unix_s + SEARCH_S)


def _peers(job: JobState, rank: int) -> tuple[int, ...]:
    """Return the ranks of the same role that run and are not slow."""
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
    """Return the time of the step by what the thread did, summed over micro-batches."""
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
    """Return the duration of the steps from onset to finding; forgotten steps count as the mean."""
    count = finding.step - finding.onset_step + 1
    last = job.progress.recent_step_s[-count:]
    return sum(last) / len(last) * count if last else 0.0


def _end_s(ranks: Collection[int], draft: StepDraft) -> float:
    """Return when these ranks ended the step, on their node's clock; 0.0: not reported."""
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
    """Return the certainty of the most certain cause; None: no cause was found."""
    return causes[0].sure if is_explained(causes) else None
