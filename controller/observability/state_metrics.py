"""What is told of a state when Prometheus asks: few series, base units. Pure.

No series per rank but the one that says where it runs (`rank_series`): of each job only the slowest
few ranks and the newest open incidents are told, and none while all are well.
"""

from collections import Counter as Tally
from collections.abc import Mapping

from pacekeeper.controller.state.state import JobState, RankLife, State
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


JOBS = _family("jobs", "Jobs known.")
NODES_CONNECTED = _family("nodes_connected", "Agents attached.")
NODE_AWAY = _family("node_away", "1: its agent is not attached, and ranks run there.", "node")
INCIDENTS_OPEN = _family("incidents_open", "Incidents open.", "kind")
INCIDENT_SLOWDOWN = _family(
    "incident_slowdown_ratio", "Open incidents but deaths: observed / expected.", *_INCIDENT
)
INCIDENT_OPENED = _family(
    "incident_opened_timestamp_seconds", "Open incidents: when they were opened.", *_INCIDENT
)
INCIDENT_RANKS = _family(
    "incident_dead_ranks", "Open incidents of death: ranks not yet gone on without.", *_INCIDENT
)
STEP = _family("job_step", "Newest complete step.", *_JOB)
TOKENS = _family("job_tokens_per_second", "Tokens per second of it.", *_JOB)
GENERATION = _family("job_generation", "Layout in force.", *_JOB)
PROPOSALS = _family("job_proposals_waiting", "Plans that wait for a person.", *_JOB)
OFFERED = _family(
    "job_plan_offered_timestamp_seconds", "When the plan was offered that is not in force.", *_JOB
)
INFO = _family("job_info", "1 for what is said of the job.", *_JOB, "watch")
BLIND = _family("job_blind", "1 while something would be missed, and why.", *_JOB, "cause")
SIGHT = _family("job_detectable_slowdown_ratio", "Smallest that would be named in time.", *_JOB)
SIGHT_STEPS = _family("job_detectable_steps", "Steps in which it would be named.", *_JOB)
SAVED_STEP = _family("job_checkpoint_step", "Newest complete checkpoint.", *_JOB)
SAVED_IN = _family("job_checkpoint_seconds", "What it took the rank that ended it.", *_JOB)
SAVE_TROUBLE = _family(
    "job_checkpoint_trouble", "1: the newest did not come about, and why.", *_JOB, "cause"
)
COPIED_STEP = _family("job_snapshot_step", "Newest snapshot in memory.", *_JOB)
COPIED_IN = _family("job_snapshot_seconds", "What it took the rank that told of it.", *_JOB)
COPY_TROUBLE = _family(
    "job_snapshot_trouble", "1: the newest did not come about, and why.", *_JOB, "cause"
)
_STORED, _COPIED = (SAVED_STEP, SAVED_IN, SAVE_TROUBLE), (COPIED_STEP, COPIED_IN, COPY_TROUBLE)
CANARY_FOUND = _family("canary_found", "1: the last made-up slow rank was found in time.", *_JOB)
CANARY_STEPS = _family("canary_steps", "Steps until it was found or given up.", *_JOB)
CANARY_LAST = _family("canary_last_step", "The step at which that was.", *_JOB)
RANKS = _family("job_ranks", "Ranks of the job, by what became of them.", *_JOB, "life")
RANK_SLOWDOWN = _family("rank_slowdown_ratio", "Slowest ranks: observed / expected.", *_JOB, "rank")
FAMILIES = tuple(value for value in list(vars().values()) if isinstance(value, MetricFamily))


def write(page: MetricsPage, state: State) -> None:
    """All of a state but where its ranks run."""
    for family in FAMILIES:
        page.lines_of(family)
    page.add(JOBS, len(state.jobs))
    page.add(NODES_CONNECTED, sum(node.is_connected for node in state.nodes.values()))
    for name in nodes_away(state):
        page.add(NODE_AWAY, 1, name)
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
    for life, count in Tally(rank.life for rank in job.ranks.values()).items():
        page.add(RANKS, count, name, life.value)
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
        if saves is not None and saves.trouble:
            page.add(trouble, 1, name, saves.trouble)


def _watch(page: MetricsPage, name: str, job: JobState) -> None:
    page.add(INFO, 1, name, job.coverage.watch.value)
    if job.coverage.blind is not None:
        page.add(BLIND, 1, name, job.coverage.blind.value)
    if job.coverage.sight is not None:
        page.add(SIGHT, job.coverage.sight.slowdown, name)
        page.add(SIGHT_STEPS, job.coverage.sight.steps, name)
    canary = job.detection.canaries.last
    if canary is not None:
        page.add(CANARY_FOUND, canary.is_found, name)
        page.add(CANARY_STEPS, canary.num_steps, name)
        page.add(CANARY_LAST, canary.step, name)


def _incident(page: MetricsPage, job: JobState, incident: Incident) -> None:
    labels = incident_labels(job, incident)
    values = tuple(labels[label] for label in _INCIDENT)
    page.add_line(INCIDENT_OPENED, INCIDENT_OPENED.line_once(incident.opened_unix_s, *values))
    if waits_for := incident.waits_for:
        line = INCIDENT_RANKS.line_once(count_ranks(waits_for), *values)
        page.add_line(INCIDENT_RANKS, line)
    if incident.finding.kind is not FindingKind.DEATH:
        line = INCIDENT_SLOWDOWN.line_once(incident.finding.slowdown, *values)
        page.add_line(INCIDENT_SLOWDOWN, line)


def incident_labels(job: JobState, incident: Incident) -> Mapping[str, str]:
    """What tells an incident from others, and where it is; empty: nobody's in particular.

    Of several dead it is the first one, as long as it lives: an alert must not begin anew.
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


def nodes_away(state: State) -> list[str]:
    """Nodes of living ranks of which no agent speaks, in order of name."""
    away = {name for name, node in state.nodes.items() if not node.is_connected}
    if not away:
        return []
    used = {job.ranks[rank].node for job in state.jobs.values() for rank in job.living}
    return sorted(away & used)


def slowest_ranks(job: JobState) -> list[tuple[int, float]]:
    """The slowest few living ranks of a job that are slow at all: (rank, slowdown)."""
    slow = [
        (number, slowdown)
        for number, slowdown in job.detection.measured.at_least(WORTH_SHOWING)
        if number in job.ranks and job.ranks[number].life is RankLife.ALIVE
    ]
    return sorted(slow, key=lambda pair: (-pair[1], pair[0]))[:SHOWN_RANKS]
