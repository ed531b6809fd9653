"""A device that was slow in one job is known in the next; what is old or too much is forgotten."""

from collections.abc import Sequence
from dataclasses import replace

from pacekeeper.controller.detection.incidents import open_incident
from pacekeeper.controller.mitigation.notices import suspect_ranks
from pacekeeper.controller.state import device_history
from pacekeeper.controller.state.device_history import (
    DAY_S,
    KEEP_S,
    KEPT_NODES,
    KEPT_STRIKES,
    LEMON_STRIKES,
    Strike,
    Strikes,
)
from pacekeeper.controller.state.events import SaveStrike
from pacekeeper.controller.state.state import JobState, RankState, State
from pacekeeper.core.incidents.findings import Finding, FindingKind, Tier
from pacekeeper.core.telemetry.attachment import Attachment

NOW_S = 1e9


def strike(number: int, *, job: str = "a", uuid: str = "GPU-1", days_ago: float = 1.0) -> Strike:
    return Strike(
        incident_id=number,
        node="n1",
        device_uuid=uuid,
        job=job,
        kind=FindingKind.DEVICE,
        slowdown=1.6,
        unix_s=NOW_S - days_ago * DAY_S,
    )


def remembered(strikes: Sequence[Strike]) -> Strikes:
    known: Strikes = {}
    for one in strikes:
        known = device_history.add_strike(known, one)
    return known


def hint(known: Strikes, *, uuid: str = "GPU-1", job: str = "b") -> str:
    return device_history.hint(known, "n1", uuid, job, NOW_S)


def test_another_job_is_told_of_the_device_its_own_job_is_not() -> None:
    known = remembered([strike(1, days_ago=3.0)])
    assert "this device" in hint(known) and "1.60 in job a (GPU-1), 3.0 days ago" in hint(known)
    assert hint(known, job="a") == ""
    assert hint(known, uuid="GPU-2") == ""
    assert hint(known, uuid="").startswith("this node")


def test_a_node_that_is_struck_again_and_again_lately_is_a_lemon() -> None:
    some = [strike(i, job=f"j{i}", days_ago=9.0 - i) for i in range(LEMON_STRIKES)]
    assert not device_history.is_lemon(remembered(some[:-1]), "n1", NOW_S)
    known = remembered(some)
    assert device_history.lemons(known, NOW_S) == {"n1"}
    assert hint(known).endswith("; n1 is a lemon")
    assert not device_history.is_lemon(known, "n1", NOW_S + 30 * DAY_S), "it went well since"


def test_what_comes_and_goes_within_an_hour_of_one_job_is_one_strike() -> None:
    known = remembered([strike(i, days_ago=1.0 - 0.001 * i) for i in range(8)])
    assert len(known["n1"]) == 1


def test_months_of_strikes_are_bounded() -> None:
    month = [strike(i, days_ago=400.0 - 0.2 * i) for i in range(2000)]
    assert len(remembered(month)["n1"]) == KEPT_STRIKES
    nodes = [replace(strike(i), node=f"n{i}") for i in range(KEPT_NODES + 5)]
    known = remembered(nodes)
    assert len(known) == KEPT_NODES and "n0" not in known and f"n{KEPT_NODES + 4}" in known
    late = replace(strike(9), node="other", unix_s=NOW_S + KEEP_S + DAY_S)
    assert list(device_history.add_strike(remembered([strike(1)]), late)) == ["other"]


def job(name: str) -> JobState:
    attachment = Attachment(job=name, rank=0, world_size=1, pid=1, device_uuid="GPU-1")
    return JobState(name=name, ranks={0: RankState(attachment=attachment, node="n1")})


def found(kind: FindingKind = FindingKind.DEVICE) -> Finding:
    return Finding(
        kind=kind, tier=Tier.PROBABLE, rank=0, slowdown=1.6, onset_step=1, step=2, reason="slow"
    )


def test_a_finding_leaves_a_strike_and_the_next_job_reads_of_it() -> None:
    state, _, said = open_incident(State(), job("a"), found(), NOW_S)
    assert [c.strike.device_uuid for c in said if isinstance(c, SaveStrike)] == ["GPU-1"]
    _, second, _ = open_incident(state, job("b"), found(), NOW_S + DAY_S)
    reason = second.incidents[-1].finding.reason
    assert reason.startswith("slow; ") and "job a (GPU-1)" in reason


def test_a_death_is_no_strike() -> None:
    state, _, said = open_incident(State(), job("a"), found(FindingKind.DEATH), NOW_S)
    assert not state.strikes and not [c for c in said if isinstance(c, SaveStrike)]


def test_ranks_on_lemons_are_saved_first_and_accused_of_nothing() -> None:
    assert suspect_ranks(job("b"), {"n1"}) == (0,)
    assert suspect_ranks(job("b"), {"n2"}) == ()
    assert not job("b").incidents
