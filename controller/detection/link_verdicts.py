"""Requests probes of pairs of ranks, and records the places that they find slow. Pure.

A probe is due once for the health of a group of ranks, whenever a link incident has no result yet,
and again while transfers are slow and no probe has located the link, each time after twice as long.
The verdict is recorded in the open link incidents, and the planner prices links by it. Called by
`mitigation/probes.py`, `detection/links.py` and the policy's inputs.
"""

from collections.abc import Mapping
from dataclasses import replace

from pacekeeper.controller.detection import incidents
from pacekeeper.controller.state.events import Command
from pacekeeper.controller.state.job_parts import LinkProbes, OpenProbe
from pacekeeper.controller.state.state import JobState
from pacekeeper.core.incidents.findings import Finding, FindingKind, Tier
from pacekeeper.core.telemetry.pair_probe import is_pairwise
from pacekeeper.predictor.links.pair_rates import judge_pairs, rates_of, slow_ranks

LEAST_BETWEEN_S = 10.0  # probes of pairs
MOST_DOUBLINGS = 6  # of the time between probes that locate nothing
UNMEASURED = "no probe: no pair of ranks was measured"


def is_probe_due(job: JobState, now_s: float) -> bool:
    """Whether pairs are to be measured: to locate a slow link, or to know a healthy fabric."""
    layout, known = job.layouts.current, job.detection.link_probes
    if layout is None or len(layout.ranks) < 2 or job.plan.desired is not None:
        return False
    if now_s - known.asked_s < LEAST_BETWEEN_S:
        return False
    if found := _open_findings(job):
        if any(not finding.probe for finding in found):
            return True
        if any(finding.places or finding.probe == UNMEASURED for finding in found):
            return False
        wait_s = LEAST_BETWEEN_S * 2.0 ** min(known.num_unlocated, MOST_DOUBLINGS)
        return has_slow_links(job) and now_s - known.asked_s >= wait_s
    is_known = known.history.covers(layout.ranks) or known.baseline_ranks == layout.ranks
    return job.detection.links.model is not None and not is_known


def note_request(job: JobState, now_s: float) -> JobState:
    """Return the job with the time of the request, and its ranks if it is for their health."""
    known, layout = job.detection.link_probes, job.layouts.current
    assert layout is not None, "a probe is due"
    known = replace(known, asked_s=now_s)
    if not _open_findings(job):
        known = replace(known, baseline_ranks=layout.ranks)
    return _with(job, known)


def apply_pairs(job: JobState, question: OpenProbe) -> tuple[JobState, list[Command]]:
    """Judge the pairs of a probe that has ended; record the verdict in the open link incidents."""
    if not is_pairwise(question.number):
        return job, []
    known, suspects = job.detection.link_probes, _open_findings(job)
    rates = rates_of(question.pairs.values(), question.ranks)
    if rates is None:
        if suspects:
            job = _with(job, replace(known, num_unlocated=known.num_unlocated + 1))
        return incidents.note_link_probe(job, None, UNMEASURED, keeps_earlier=True)
    if not suspects:
        return _with(job, replace(known, history=known.history.learn(rates))), []
    node_of = {rank: job.ranks[rank].node for rank in question.ranks}
    worst = max(finding.slowdown for finding in suspects)
    verdict = judge_pairs(rates, known.history, node_of, suspected=worst)
    places = verdict.places[0].candidates if verdict.places else ()
    num_unlocated = 0 if places else known.num_unlocated + 1
    # Without the pairs' past, as after a restart, what locates nothing refutes no earlier result.
    is_blind = not places and known.verdict is None and not known.history.covers(question.ranks)
    kept = None if is_blind else verdict
    job = _with(job, replace(known, verdict=kept, num_unlocated=num_unlocated))
    tier = None
    if verdict.num_pairs:
        is_slow = verdict.places or verdict.num_unexplained
        tier = Tier.CONFIRMED if is_slow else Tier.SUSPECTED
    return incidents.note_link_probe(job, tier, str(verdict), places, keeps_earlier=is_blind)


def close_verdict(job: JobState) -> JobState:
    """Drop the verdict once no link incident is open."""
    known = job.detection.link_probes
    if known.verdict is None or _open_findings(job):
        return job
    return _with(job, replace(known, verdict=None, num_unlocated=0))


def has_slow_links(job: JobState) -> bool:
    """Whether transfers are slow, of some ranks or of all together."""
    links = job.detection.links
    return bool(links.slow) or (links.common is not None and links.common.is_open)


def slow_links(job: JobState) -> Mapping[int, float]:
    """Return the slowdown of each rank's link, for the planner.

    By the places that a probe found. Without one, by the transfers of the ranks themselves: those
    carry the job's own messages, and are still slow while the incident is open.
    """
    verdict, charted = job.detection.link_probes.verdict, job.detection.links.slow
    layout = job.layouts.current
    if verdict is None or layout is None or not verdict.places:
        return charted
    return slow_ranks(verdict, charted, layout.ranks)


def _open_findings(job: JobState) -> list[Finding]:
    found = (incident.finding for incident in job.open_incidents)
    return [finding for finding in found if finding.kind is FindingKind.LINK]


def _with(job: JobState, known: LinkProbes) -> JobState:
    return replace(job, detection=replace(job.detection, link_probes=known))
