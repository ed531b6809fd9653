"""What people hear of: once it has stood for long enough, and once more when it is over."""

from dataclasses import replace

import pytest

from pacekeeper.controller.observability.alerts import (
    AlertNotification,
    Key,
    PendingAlert,
    update_alerts,
)
from pacekeeper.controller.state.job_parts import Saves, SaveTrouble
from pacekeeper.controller.state.state import JobState, NodeState, RankState, RankStatus, State
from pacekeeper.core.incidents.findings import (
    Blindness,
    CoverageState,
    Finding,
    FindingKind,
    Incident,
    Tier,
)
from pacekeeper.core.incidents.rank_failures import RankFailures
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.predictor.assurance.canary import Canaries, CanaryResult
from support.job_parts import job_with

RANK = RankState(
    attachment=Attachment(job="j", rank=3, world_size=4, pid=1, device_uuid="GPU-3"), node="n7"
)


def incident(kind: FindingKind = FindingKind.DEVICE, rank: int | None = 3) -> Incident:
    finding = Finding(
        kind=kind,
        tier=Tier.PROBABLE,
        rank=rank,
        slowdown=1.6,
        onset_step=1,
        step=2,
        reason="rank 3 is slow",
        cause="heat",
    )
    return Incident(incident_id=5, job="j", finding=finding, opened_unix_s=0.0)


def job(**values: object) -> JobState:
    known = {"ranks": {3: RANK}, "blind": None, "state": CoverageState.HEALTHY, **values}
    return job_with("j", **known)


class Look:
    """Looks at states one after the other."""

    def __init__(self, hold_ratio: float = 1.0) -> None:
        self.standing: dict[Key, PendingAlert] = {}
        self.hold_ratio = hold_ratio

    def at(self, unix_s: float, state: State) -> tuple[AlertNotification, ...]:
        standing, told = update_alerts(self.standing, state, unix_s, self.hold_ratio)
        self.standing = dict(standing)
        return told


def of(known: JobState | None) -> State:
    return State(jobs={} if known is None else {"j": known})


def test_it_is_told_after_its_time_once_and_once_when_it_is_over() -> None:
    look = Look()
    state = of(job(incidents=(incident(),)))
    assert look.at(0.0, state) == ()
    assert look.at(29.0, state) == ()
    (told,) = look.at(30.0, state)
    assert (told.began_unix_s, told.ended_unix_s) == (0.0, None)
    assert look.at(31.0, state) == ()
    (over,) = look.at(32.0, of(job()))
    assert over == AlertNotification(notice=told.notice, began_unix_s=0.0, ended_unix_s=32.0)
    assert look.at(33.0, of(job())) == () and look.standing == {}


def test_what_goes_before_its_time_is_not_told_and_begins_anew() -> None:
    look = Look()
    state = of(job(incidents=(incident(),)))
    look.at(0.0, state)
    assert look.at(20.0, of(job())) == ()
    assert look.at(25.0, state) == ()
    assert look.at(54.0, state) == ()
    assert len(look.at(55.0, state)) == 1


def test_new_words_of_the_same_thing_are_no_news_but_stand_at_its_end() -> None:
    look = Look(hold_ratio=0.0)
    (told,) = look.at(0.0, of(job(incidents=(incident(),))))
    worse = replace(incident(), finding=replace(incident().finding, slowdown=2.0))
    assert look.at(1.0, of(job(incidents=(worse,)))) == ()
    (over,) = look.at(2.0, of(job()))
    assert "1.60" in told.notice.summary and "2.00" in over.notice.summary


def test_an_incident_says_where_and_why() -> None:
    (told,) = Look(hold_ratio=0.0).at(0.0, of(job(incidents=(incident(),))))
    assert told.notice.alert == "PacekeeperRankSlow" and told.notice.severity == "warning"
    assert told.notice.labels == {
        "job_name": "j",
        "incident": "5",
        "kind": "device",
        "rank": "3",
        "node": "n7",
        "UUID": "GPU-3",
    }
    assert all(word in told.notice.summary for word in ("Rank 3", "job j", "n7", "1.60"))
    assert told.notice.description == "rank 3 is slow; heat"


def deaths(*died: tuple[int, float | None]) -> State:
    """Of these ranks, each since when the job goes on without it; one incident."""
    known = tuple(
        RankFailures(ranks=((rank, rank),), reason="why", step=1, unix_s=0.0, closed_unix_s=over_s)
        for rank, over_s in died
    )
    return of(job(incidents=(replace(incident(FindingKind.DEATH), rank_failures=known),)))


def test_deaths_are_told_once_for_all_ranks_and_again_where_it_is_about_others() -> None:
    look = Look()
    look.at(0.0, deaths((3, None)))
    assert look.at(299.0, deaths((3, None), (4, None))) == (), "the time goes on"
    (told,) = look.at(300.0, deaths((3, None), (4, None)))
    assert "job j" in told.notice.summary.lower() and "ranks 3 and 4" in told.notice.summary
    assert look.at(301.0, deaths((3, None), (4, None))) == ()
    (more,) = look.at(302.0, deaths((3, 302.0), (4, None), (5, None)))
    assert "ranks 4 and 5" in more.notice.summary
    assert more.ended_unix_s is None and more.began_unix_s == 0.0


def test_what_grows_keeps_its_labels_and_so_its_fingerprint() -> None:
    (one,) = Look(hold_ratio=0.0).at(0.0, deaths((3, None)))
    (two,) = Look(hold_ratio=0.0).at(0.0, deaths((3, None), (2, None)))
    assert one.notice.key == two.notice.key
    assert one.notice.labels["rank"] == "3"


AWAY = NodeState(name="n7", agent_incarnation="x", is_connected=False)
MISSED = CanaryResult(rank=0, slowdown=1.5, is_found=False, num_steps=10, step=9)


@pytest.mark.parametrize(
    ("state", "alerts"),
    [
        (of(job()), []),
        (of(job(incidents=(incident(FindingKind.HOST, None),))), ["PacekeeperJobSlow"]),
        (of(job(incidents=(incident(FindingKind.DEATH),))), ["PacekeeperRecoveryStalled"]),
        (of(job(incidents=(incident(FindingKind.HANG),))), ["PacekeeperHang"]),
        (of(job(incidents=(incident(FindingKind.HANG, None),))), ["PacekeeperHang"]),
        (
            of(job(incidents=(incident(FindingKind.DEATH),), state=CoverageState.ENDED)),
            ["PacekeeperJobDied"],
        ),
        (
            of(
                job(ranks={3: replace(RANK, status=RankStatus.FINISHED)}, state=CoverageState.ENDED)
            ),
            [],
        ),
        (of(job(incidents=(incident(FindingKind.EXPERT_IMBALANCE, None),))), []),
        (of(job(incidents=(replace(incident(), closed_unix_s=1.0),))), []),
        (of(job(blind=Blindness.NOISE)), ["PacekeeperBlind"]),
        (
            of(job(blind=Blindness.CANARY, canaries=Canaries(last=MISSED))),
            ["PacekeeperCanaryMissed"],
        ),
        (
            of(job(saves=Saves(trouble=SaveTrouble.LATE, reason="full"))),
            ["PacekeeperCheckpointsMissed"],
        ),
        (
            of(job(snapshots=Saves(trouble=SaveTrouble.LATE, reason="far"))),
            ["PacekeeperSnapshotsMissed"],
        ),
        (State(jobs={"j": job()}, nodes={"n7": AWAY}), ["PacekeeperAgentDisconnected"]),
        (State(jobs={"j": job()}, nodes={"n8": replace(AWAY, name="n8")}), []),
    ],
)
def test_what_stands_in_a_state_is_told_by_the_name_of_its_rule(
    state: State, alerts: list[str]
) -> None:
    told = Look(hold_ratio=0.0).at(0.0, state)
    assert [telling.notice.alert for telling in told] == alerts
