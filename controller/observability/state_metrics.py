"""Metrics of the state, rendered at each scrape: few series, base units.

Only `rank_info` has a series per rank. Of each job the slowest few ranks and the newest open
incidents are exported; none while all ranks are healthy.
"""

from collections import Counter as Tally
from collections.abc import Mapping

from pacekeeper.controller.state.state import JobState, RankStatus, State
from pacekeeper.core.incidents.findings import FindingKind, Incident
from pacekeeper.core.incidents.rank_ranges import count_ranks
from pacekeeper.core.prometheus_text import MetricFamily, MetricsPage

SHOWN_RANKS = 8  # per job
SHOWN_INCIDENTS = 64  # per job, the newest
WORTH_SHOWING = 1.05  # slowdown
_JOB = ("job_name",)
_INCIDENT = ("job_name", "incident", "kind", "rank", "node", "UUID")


def _family(name: str, text: str, *labels: str) -> MetricFamily:
    return MetricFamily(f"pacekeeper_{name}", text, *labels)


JOBS = _family("jobs", "Known jobs.")
NODES_CONNECTED = _family("nodes_connected", "Attached agents.")
NODE_DISCONNECTED = _family(
    "node_disconnected", "1 for a node with running ranks and no attached agent.", "node"
)
INCIDENTS_OPEN = _family("incidents_open", "Open incidents.", "kind")
INCIDENT_SLOWDOWN = _family(
    "incident_slowdown_ratio",
    "Observed over expected time of open incidents, rank failures excluded.",
    *_INCIDENT,
)
INCIDENT_OPENED = _family(
    "incident_opened_timestamp_seconds", "When the open incident was opened.", *_INCIDENT
)
INCIDENT_RANKS = _family(
    "incident_dead_ranks",
    "Dead ranks of the open incident that the job has not continued without.",
    *_INCIDENT,
)
STEP = _family("job_step", "Newest complete step.", *_JOB)
TOKENS = _family("job_tokens_per_second", "Tokens per second of the newest complete step.", *_JOB)
GENERATION = _family("job_generation", "Generation of the current layout.", *_JOB)
PROPOSALS = _family("job_proposals_waiting", "Plans that wait for approval.", *_JOB)
OFFERED = _family(
    "job_plan_offered_timestamp_seconds",
    "When the plan was offered that is not applied yet.",
    *_JOB,
)
INFO = _family("job_info", "1 for the watch state of the job.", *_JOB, "watch")
BLIND = _family(
    "job_blind", "1 while a slow rank would not be detected, with the cause.", *_JOB, "cause"
)
SIGHT = _family(
    "job_detectable_slowdown_ratio", "Smallest slowdown that is attributed in time.", *_JOB
)
SIGHT_STEPS = _family("job_detectable_steps", "Steps until that slowdown is attributed.", *_JOB)
SAVED_STEP = _family("job_checkpoint_step", "Step of the newest complete checkpoint.", *_JOB)
SAVED_IN = _family("job_checkpoint_seconds", "Duration on the rank that completed it.", *_JOB)
SAVE_TROUBLE = _family(
    "job_checkpoint_trouble", "1 if the newest one failed, with the cause.", *_JOB, "cause"
)
COPIED_STEP = _family("job_snapshot_step", "Step of the newest snapshot in memory.", *_JOB)
COPIED_IN = _family("job_snapshot_seconds", "Duration on the rank that reported it.", *_JOB)
COPY_TROUBLE = _family(
    "job_snapshot_trouble", "1 if the newest one failed, with the cause.", *_JOB, "cause"
)
_STORED, _COPIED = (SAVED_STEP, SAVED_IN, SAVE_TROUBLE), (COPIED_STEP, COPIED_IN, COPY_TROUBLE)
CANARY_FOUND = _family("canary_found", "1 if the last canary was found in time.", *_JOB)
CANARY_STEPS = _family("canary_steps", "Steps until it was found or abandoned.", *_JOB)
CANARY_LAST = _family("canary_last_step", "Step at which it ended.", *_JOB)
RANKS = _family("job_ranks", "Ranks of the job by state.", *_JOB, "state")
RANK_SLOWDOWN = _family(
    "rank_slowdown_ratio", "Observed over expected time of the slowest ranks.", *_JOB, "rank"
)
FAMILIES = tuple(value for value in list(vars().values()) if isinstance(value, MetricFamily))


def write(page: MetricsPage, state: State) -> None:
    """Write all metrics of a state except `rank_info`."""
    for family in FAMILIES:
        page.lines_of(family)
    page.add(JOBS, len(state.jobs))
    page.add(NODES_CONNECTED, sum(node.is_connected for node in state.nodes.values()))
    for name in disconnected_nodes(state):
        page.add(NODE_DISCONNECTED, 1, name)
    kinds = Tally(i.finding.kind for job in state.jobs.values() for i in job.open_incidents)
    for kind in FindingKind:
        page.add(INCIDENTS_OPEN, kinds[kind], kind.value)
    for name, job in state.jobs.items():
        _progress(page, name, job, state.unix_offset_s)
        _watch(page, name, job)
        for incident in job.open_incidents[-SHOWN_INCIDENTS:]:
            _incident(page, job, incident)
        for number, slowdown in slowest_ranks(job):
            page.add(RANK_SLOWDOWN, slowdown, name, str(number))


def _progress(page: MetricsPage, name: str, job: JobState, unix_offset_s: float) -> None:
    page.add(STEP, job.progress.step, name)
    page.add(TOKENS, job.progress.tokens_per_s, name)
    page.add(GENERATION, 0 if job.layouts.current is None else job.layouts.current.generation, name)
    for status, count in Tally(rank.status for rank in job.ranks.values()).items():
        page.add(RANKS, count, name, status.value)
    is_waiting = job.plan.open_proposal is not None and job.plan.approved is None
    page.add(PROPOSALS, is_waiting, name)
    if job.plan.offer is not None:
        page.add(OFFERED, job.plan.offer.offered_s + unix_offset_s, name)
    for saves, (step, took_s, trouble) in (
        (job.progress.saves, _STORED),
        (job.progress.snapshots, _COPIED),
    ):
        if saves is not None and saves.complete[1] >= 0:
            page.add(step, saves.complete[1], name)
            page.add(took_s, saves.duration_s, name)
        if saves is not None and saves.trouble is not None:
            page.add(trouble, 1, name, saves.trouble)


def _watch(page: MetricsPage, name: str, job: JobState) -> None:
    page.add(INFO, 1, name, job.coverage.state.value)
    if job.coverage.blind is not None:
        page.add(BLIND, 1, name, job.coverage.blind.value)
    if job.coverage.sensitivity is not None:
        page.add(SIGHT, job.coverage.sensitivity.slowdown, name)
        page.add(SIGHT_STEPS, job.coverage.sensitivity.steps, name)
    canary = job.detection.canaries.last
    if canary is not None:
        page.add(CANARY_FOUND, canary.is_found, name)
        page.add(CANARY_STEPS, canary.num_steps, name)
        page.add(CANARY_LAST, canary.step, name)


def _incident(page: MetricsPage, job: JobState, incident: Incident) -> None:
    labels = incident_labels(job, incident)
    values = tuple(labels[label] for label in _INCIDENT)
    page.add_line(INCIDENT_OPENED, INCIDENT_OPENED.line_once(incident.opened_unix_s, *values))
    if unresolved_ranks := incident.unresolved_ranks:
        line = INCIDENT_RANKS.line_once(count_ranks(unresolved_ranks), *values)
        page.add_line(INCIDENT_RANKS, line)
    if incident.finding.kind not in (FindingKind.DEATH, FindingKind.HANG):
        line = INCIDENT_SLOWDOWN.line_once(incident.finding.slowdown, *values)
        page.add_line(INCIDENT_SLOWDOWN, line)


def incident_labels(job: JobState, incident: Incident) -> Mapping[str, str]:
    """The labels of an incident; those that do not apply are empty.

    Of several dead ranks it names the first one for as long as the incident is open: with other
    labels an alert would start again.
    """
    number = incident.finding.rank
    rank = None if number is None else job.ranks.get(number)
    return {
        "job_name": job.name,
        "incident": str(incident.incident_id),
        "kind": incident.finding.kind.value,
        "rank": "" if number is None else str(number),
        "node": "" if rank is None else rank.node,
        "UUID": "" if rank is None else rank.attachment.device_uuid,
    }


def disconnected_nodes(state: State) -> list[str]:
    """Nodes with live ranks and without an attached agent, by name."""
    disconnected = {name for name, node in state.nodes.items() if not node.is_connected}
    if not disconnected:
        return []
    used = {job.ranks[rank].node for job in state.jobs.values() for rank in job.living}
    return sorted(disconnected & used)


def slowest_ranks(job: JobState) -> list[tuple[int, float]]:
    """(rank, slowdown) of the slowest live ranks of a job above `WORTH_SHOWING`."""
    slow = [
        (number, slowdown)
        for number, slowdown in job.detection.measured.at_least(WORTH_SHOWING)
        if number in job.ranks and job.ranks[number].status is RankStatus.ALIVE
    ]
    return sorted(slow, key=lambda pair: (-pair[1], pair[0]))[:SHOWN_RANKS]
