"""Alerts of the webhook, under the names of the Prometheus alert rules.

Level-based: a condition that lasts long enough in the state is sent once, and once more when it
ends. After a restart of the controller, conditions that still hold are sent again. A condition that
begins and ends between two updates leaves an incident only.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pacekeeper.controller.observability.state_metrics import disconnected_nodes, incident_labels
from pacekeeper.controller.state.state import JobState, RankStatus, State
from pacekeeper.core.incidents.findings import CoverageState, FindingKind, slowdown_text
from pacekeeper.core.incidents.rank_failures import ranks_label

# Severity and seconds, as in deploy/pacekeeper.alerts.yml.
RULES: Mapping[str, tuple[str, float]] = {
    "PacekeeperRankSlow": ("warning", 30.0),
    "PacekeeperJobSlow": ("warning", 30.0),
    "PacekeeperHang": ("critical", 15.0),
    "PacekeeperRecoveryStalled": ("critical", 300.0),
    "PacekeeperJobDied": ("critical", 60.0),
    "PacekeeperBlind": ("warning", 300.0),
    "PacekeeperCanaryMissed": ("critical", 0.0),
    "PacekeeperProposalWaits": ("warning", 60.0),
    "PacekeeperCheckpointsMissed": ("warning", 600.0),
    "PacekeeperSnapshotsMissed": ("warning", 600.0),
    "PacekeeperAgentDisconnected": ("warning", 120.0),
}
Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One condition to alert on.

    Attributes:
        alert: Name of the rule.
        labels: Distinguish it from others of that name.
        summary: One sentence.
        description: Details.
        extent: The ranks concerned, if they can change: then it is sent again.
    """

    alert: str
    labels: Mapping[str, str]
    summary: str
    description: str = ""
    extent: str = ""

    @property
    def key(self) -> Key:
        """Identifies the alert, independent of its texts."""
        return self.alert, tuple(sorted(self.labels.items()))

    @property
    def severity(self) -> str:
        """The severity of its rule."""
        return RULES[self.alert][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingAlert:
    """An alert that holds since a monotonic time, and whether it was sent."""

    notice: Alert
    since_s: float
    is_told: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertNotification:
    """A notification to send; `ended_unix_s` None: the alert is active."""

    notice: Alert
    began_unix_s: float
    ended_unix_s: float | None = None


def update_alerts(
    before: Mapping[Key, PendingAlert], state: State, now_s: float, hold_ratio: float
) -> tuple[Mapping[Key, PendingAlert], tuple[AlertNotification, ...]]:
    """Compare the newest state with the alerts of the last update.

    Args:
        before: The alerts of the last update.
        state: The newest state.
        now_s: Monotonic time.
        hold_ratio: Scales how long a condition must last.

    Returns:
        The alerts that hold now, and the notifications to send.
    """
    after: dict[Key, PendingAlert] = {}
    told: list[AlertNotification] = []
    for notice in _notices(state):
        known = before.get(notice.key)
        since_s = now_s if known is None else known.since_s
        is_told = known is not None and known.is_told and known.notice.extent == notice.extent
        if not is_told and now_s - since_s >= RULES[notice.alert][1] * hold_ratio:
            is_told = True
            told.append(
                AlertNotification(notice=notice, began_unix_s=since_s + state.unix_offset_s)
            )
        after[notice.key] = PendingAlert(notice=notice, since_s=since_s, is_told=is_told)
    for key, known in before.items():
        if known.is_told and key not in after:
            over = AlertNotification(
                notice=known.notice,
                began_unix_s=known.since_s + state.unix_offset_s,
                ended_unix_s=now_s + state.unix_offset_s,
            )
            told.append(over)
    return after, tuple(told)


def _notices(state: State) -> Iterator[Alert]:
    for job in state.jobs.values():
        yield from _of_incidents(job)
        yield from _of_watch(job)
        proposal = job.plan.open_proposal
        if proposal is not None and job.plan.approved is None:
            number = proposal.proposal_id
            yield Alert(
                alert="PacekeeperProposalWaits",
                labels={"job_name": job.name},
                summary=f"A plan for job {job.name} waits for approval",
                description=f"{proposal.decision.reason}. Answer with `pacekeeper approve "
                f"{number}` or `pacekeeper deny {number}`.",
            )
        for level, saves in (
            ("Checkpoint", job.progress.saves),
            ("Snapshot", job.progress.snapshots),
        ):
            if saves is not None and saves.trouble is not None:
                yield Alert(
                    alert=f"Pacekeeper{level}sMissed",
                    labels={"job_name": job.name, "cause": saves.trouble.value},
                    summary=f"{level}s of job {job.name} are missing ({saves.trouble})",
                    description=saves.reason,
                )
    for node in disconnected_nodes(state):
        yield Alert(
            alert="PacekeeperAgentDisconnected",
            labels={"node": node},
            summary=f"The agent of node {node} is disconnected while ranks run there",
        )


def _of_incidents(job: JobState) -> Iterator[Alert]:
    for incident in job.open_incidents:
        finding, labels = incident.finding, incident_labels(job, incident)
        if finding.kind.is_advice or job.coverage.state is CoverageState.ENDED:
            continue
        words = "; ".join(filter(None, (finding.reason, finding.cause_text)))
        extent = ""
        if finding.kind is FindingKind.DEATH:
            alert = "PacekeeperRecoveryStalled"
            extent = ranks_label(incident.unresolved_ranks)
            summary = f"Job {job.name} has not continued without {extent}"
        elif finding.kind is FindingKind.HANG:
            alert = "PacekeeperHang"
            summary = f"Job {job.name} stands still"
            if finding.rank is not None:
                summary = f"Rank {finding.rank} of job {job.name} on node {labels['node']} hangs"
        elif finding.rank is None:
            alert = "PacekeeperJobSlow"
            slowdown = slowdown_text(finding.slowdown)
            summary = f"Steps of job {job.name} take {slowdown} ({finding.kind})"
        else:
            alert = "PacekeeperRankSlow"
            summary = (
                f"Rank {finding.rank} of job {job.name} on node {labels['node']} takes "
                f"{slowdown_text(finding.slowdown)} ({finding.kind})"
            )
        yield Alert(alert=alert, labels=labels, summary=summary, description=words, extent=extent)


def _of_watch(job: JobState) -> Iterator[Alert]:
    has_finished = any(rank.status is RankStatus.FINISHED for rank in job.ranks.values())
    if job.coverage.state is CoverageState.ENDED and not has_finished:
        yield Alert(
            alert="PacekeeperJobDied",
            labels={"job_name": job.name},
            summary=f"Job {job.name} ended, and no rank of it finished",
        )
    canary = job.detection.canaries.last
    if canary is not None and not canary.is_found:
        yield Alert(
            alert="PacekeeperCanaryMissed",
            labels={"job_name": job.name},
            summary=f"A canary of job {job.name} was not detected",
            description="The detector missed an injected slowdown, so it would miss a real one.",
        )
    elif job.coverage.blind is not None:
        yield Alert(
            alert="PacekeeperBlind",
            labels={"job_name": job.name, "cause": job.coverage.blind.value},
            summary=f"A slow rank of job {job.name} would not be detected "
            f"({job.coverage.blind.value})",
            description=job.coverage.reason,
        )
