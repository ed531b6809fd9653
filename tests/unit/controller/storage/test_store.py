"""The store opens what is ours, refuses the rest without touching it, and keeps all or nothing."""

import math
import os
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from pacekeeper.controller.state.device_history import DAY_S, Strike
from pacekeeper.controller.state.state import JobRecord
from pacekeeper.controller.storage.store import Store
from pacekeeper.controller.storage.tables import DECISIONS, SCHEMA_VERSION
from pacekeeper.core.errors import ExitCode, HostError, VersionError
from pacekeeper.core.incidents.findings import (
    Decision,
    Finding,
    FindingKind,
    Incident,
    MitigationLevel,
    Tier,
)
from pacekeeper.core.incidents.proposals import Proposal, ProposalState
from support.controllers import first_layout

LAYOUT = first_layout()


def incident(number: int, slowdown: float = 1.6) -> Incident:
    return Incident(
        incident_id=number,
        job="train",
        finding=Finding(
            kind=FindingKind.DEVICE,
            tier=Tier.PROBABLE,
            rank=2,
            slowdown=slowdown,
            onset_step=7,
            step=9,
            reason="slow",
        ),
        opened_unix_s=1.0,
    )


def job(generation: int = 3) -> JobRecord:
    return JobRecord(
        name="train",
        newest_generation=generation,
        step=5,
        layout=LAYOUT,
        layout_reason="it began so",
        desired=None,
        baseline=None,
    )


def write(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def test_a_fresh_store_is_empty_and_counts_incidents_from_1(tmp_path: Path) -> None:
    assert Store.open(tmp_path / "new" / "folder" / "store").load() == ((), (), 1)


def test_what_is_saved_again_replaces_what_was(place: str | Path) -> None:
    store = Store.open(place)
    store.save_incident(incident(4, slowdown=1.6))
    store.save_incident(incident(4, slowdown=2.5))
    store.save_job(job(generation=3))
    store.save_job(job(generation=4))
    jobs, incidents, next_id = store.load()
    assert [j.newest_generation for j in jobs] == [4]
    assert [i.finding.slowdown for i in incidents] == [2.5]
    assert next_id == 5


def test_a_forgotten_job_does_not_come_back_and_its_history_stays(place: str | Path) -> None:
    store = Store.open(place)
    store.save_job(job())
    store.save_incident(incident(7))
    store.forget_job("train")
    assert store.load() == ((), (), 8), "no number is given twice"
    store.save_job(job())
    assert [i.incident_id for i in store.load()[1]] == [7]


@pytest.mark.parametrize("slowdown", [math.inf, math.nan])
def test_a_slowdown_that_is_no_finite_number_comes_back(place: str | Path, slowdown: float) -> None:
    store = Store.open(place)
    store.save_job(job())
    store.save_incident(incident(1, slowdown))
    ((loaded,)) = store.load()[1]
    assert repr(loaded.finding.slowdown) == repr(slowdown)


def test_layouts_of_the_past_are_found_by_job_and_generation(place: str | Path) -> None:
    store = Store.open(place)
    store.save_layout("train", LAYOUT, "the first", 1.0)
    assert store.layout("train", LAYOUT.generation) == (LAYOUT, "the first")
    assert store.layout("train", LAYOUT.generation + 1) is None
    assert store.layout("other", LAYOUT.generation) is None


def test_the_layouts_of_a_job_that_begins_anew_are_gone_and_those_of_others_stay(
    place: str | Path,
) -> None:
    store = Store.open(place)
    for job in ("a", "b"):
        store.save_layout(job, LAYOUT, "first", 1.0)
    store.forget_layouts("a")
    assert store.layout("a", LAYOUT.generation) is None
    assert store.layout("b", LAYOUT.generation) == (LAYOUT, "first")


def test_decisions_are_kept_in_order_with_their_prices(place: str | Path) -> None:
    store = Store.open(place)
    for step, level in enumerate((MitigationLevel.TOKEN_SHARES, MitigationLevel.RETURN_HOME)):
        decision = Decision(
            level=level, layout=None, reason=f"why {step}", current_step_s=0.4, planned_step_s=0.3
        )
        store.save_decision("train", step, decision, 5.0)
    store.close()
    store = Store.open(place)
    store.save_decision(
        "train",
        2,
        Decision(
            level=MitigationLevel.NOTHING,
            layout=None,
            reason="",
            current_step_s=0.4,
            planned_step_s=0.3,
        ),
        6.0,
    )
    with store.connected() as connection:
        what = sa.select(DECISIONS).order_by(DECISIONS.c.decision_id)
        rows = [row._mapping for row in connection.execute(what)]
    store.close()
    assert [(row["decision_id"], row["step"], row["level"], row["reason"]) for row in rows] == [
        (1, 0, "token_shares", "why 0"),
        (2, 1, "return_home", "why 1"),
        (3, 2, "nothing", ""),
    ]
    assert [row["unix_s"] for row in rows] == [5.0, 5.0, 6.0]


def proposal(number: int, answer: ProposalState = ProposalState.WAITING) -> Proposal:
    decision = Decision(
        level=MitigationLevel.MOVE_REPLICAS,
        layout=replace(LAYOUT, generation=4),
        reason="it pays",
        current_step_s=0.4,
        planned_step_s=0.3,
        fluid_step_s=0.25,
        cost_s=1.5,
        moved_bytes=7,
    )
    return Proposal(
        proposal_id=number,
        job="train",
        decision=decision,
        base=LAYOUT,
        slow={2: 1.6000000000000001, 11: math.pi},
        incident_ids=(3, 5),
        made_unix_s=1e9 + 0.1,
        expires_unix_s=1e9 + 900.1,
        answer=answer,
        operator="" if answer is ProposalState.WAITING else "ada (there)",
        note="",
    )


def test_open_proposals_come_back_as_they_were_and_numbers_go_on(place: str | Path) -> None:
    store = Store.open(place)
    assert store.open_proposals() == ((), 1)
    store.save_job(job())
    store.save_proposal(proposal(1))
    store.save_proposal(proposal(1, ProposalState.DENIED))
    store.save_proposal(proposal(2))
    store.save_proposal(proposal(3, ProposalState.APPROVED))
    store.save_proposal(replace(proposal(4), job="other"))
    open_ones, next_id = store.open_proposals()
    assert open_ones == (proposal(2), proposal(3, ProposalState.APPROVED))
    assert next_id == 5


def test_a_damaged_proposal_is_said_to_be_damaged(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    store.save_job(job())
    store.save_proposal(proposal(1))
    write(tmp_path / "store", "UPDATE proposals SET base = 'no layout'")
    with pytest.raises(HostError, match="damaged"):
        store.open_proposals()


def test_a_transaction_of_unknown_outcome_is_repeated_without_a_second_decision(
    place: str | Path,
) -> None:
    store = Store.open(place)
    why = Decision(
        level=MitigationLevel.NOTHING,
        layout=None,
        reason="why",
        current_step_s=1.0,
        planned_step_s=1.0,
    )

    def write_both() -> None:
        for step in (1, 2):
            store.save_decision("train", step, why, 5.0)

    with store.transaction():
        write_both()
    store._next_decision_id = 1  # as where COMMIT was done and its answer was lost
    with store.transaction():
        write_both()
    with store.connected() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(DECISIONS)) == 2
    store.close()


@pytest.mark.parametrize(
    ("value", "stored"),
    [("a\0b", "a\ufffdb"), ("\U0001f422 \u00e9", "\U0001f422 \u00e9"), ("", "")],
)
def test_texts_are_the_same_on_both_engines(place: str | Path, value: str, stored: str) -> None:
    store = Store.open(place)
    store.save_job(replace(job(), name=value, layout_reason=value))
    ((loaded,), _, _) = store.load()
    assert (loaded.name, loaded.layout_reason) == (stored, stored)
    store.forget_job(value)
    assert store.load()[0] == ()
    store.close()


def test_numbers_keep_all_their_digits(place: str | Path) -> None:
    store = Store.open(place)
    store.save_job(replace(job(), run_id=2**61))
    store.save_incident(replace(incident(2**40), opened_unix_s=1795402812.25))
    ((loaded,), (found,), next_id) = store.load()
    assert (loaded.run_id, found.opened_unix_s, next_id) == (2**61, 1795402812.25, 2**40 + 1)
    store.close()


def test_names_are_in_the_order_of_their_bytes(place: str | Path) -> None:
    store = Store.open(place)
    names = ["a", "B", "_", "\u00e4", "Z", "b c"]
    for name in names:
        store.save_job(replace(job(), name=name))
    assert [one.name for one in store.load()[0]] == sorted(names, key=str.encode)
    store.close()


def test_a_transaction_that_fails_leaves_nothing_and_the_next_one_works(place: str | Path) -> None:
    store = Store.open(place)
    store.save_job(job())
    with pytest.raises(RuntimeError), store.transaction():
        store.save_incident(incident(1))
        raise RuntimeError
    assert store.load()[1] == ()
    with store.transaction():
        store.save_incident(incident(2))
    assert [i.incident_id for i in store.load()[1]] == [2]


def test_two_controllers_never_share_a_store(tmp_path: Path) -> None:
    first = Store.open(tmp_path / "store")
    with pytest.raises(HostError, match="in use by another controller"):
        Store.open(tmp_path / "store")
    first.close()
    Store.open(tmp_path / "store")


def test_a_newer_schema_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "store"
    Store.open(path).close()
    write(path, f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    before = path.read_bytes()
    with pytest.raises(VersionError, match=f"schema {SCHEMA_VERSION + 1}.* reads") as caught:
        Store.open(path)
    assert caught.value.exit_code is ExitCode.VERSION
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "statements",
    [("CREATE TABLE jobs (x)",), ("PRAGMA user_version = 1",), ("PRAGMA application_id = 7",)],
)
def test_a_database_of_another_program_is_left_alone(
    tmp_path: Path, statements: tuple[str, ...]
) -> None:
    path = tmp_path / "theirs"
    write(path, *statements)
    before = path.read_bytes()
    with pytest.raises(HostError, match="of another program"):
        Store.open(path)
    assert path.read_bytes() == before


def test_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("something to read, longer than the header of a database file " * 3)
    with pytest.raises(HostError, match="not a database") as caught:
        Store.open(path)
    assert caught.value.exit_code is ExitCode.HOST


def test_a_path_that_can_not_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError, match=r"Not a directory|File exists"):
        Store.open(tmp_path / "file" / "store")
    with pytest.raises(HostError, match="unable to open"):
        Store.open(tmp_path)


def test_a_store_that_was_refused_can_be_opened_once_it_is_put_right(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.write_text("no database, but still longer than the header of one would be " * 3)
    with pytest.raises(HostError):
        Store.open(path)
    path.unlink()
    assert Store.open(path).load() == ((), (), 1)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE jobs SET layout = 'no layout'",
        "UPDATE incidents SET kind = 'ghost'",
        "UPDATE incidents SET actions = '['",
        "DROP TABLE incidents",
    ],
)
def test_a_damaged_store_is_said_to_be_damaged(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "store"
    store = Store.open(path)
    store.save_job(job())
    store.save_incident(incident(1))
    store.close()
    write(path, damage)
    with pytest.raises(HostError, match="damaged"):
        Store.open(path).load()


def test_strikes_outlive_the_controller_and_the_oldest_go(place: str | Path) -> None:
    def strike(number: int, day: float) -> Strike:
        return Strike(
            incident_id=number,
            node="n",
            device_uuid="GPU-1",
            job=f"job-{number}",
            kind=FindingKind.DEVICE,
            slowdown=1.6,
            unix_s=day * DAY_S,
        )

    store = Store.open(place)
    first, last = strike(1, day=1.0), strike(2, day=50.0)
    for one in (first, last, last):
        store.history_tables.save_strike(one)
    store.close()
    store = Store.open(place)
    assert store.strikes() == {"n": (first, last)}
    newest = strike(3, day=120.0)
    store.history_tables.save_strike(newest)
    assert store.strikes() == {"n": (last, newest)}, "more than 90 days are forgotten"


def test_a_new_store_and_its_log_are_their_owners_only(tmp_path: Path) -> None:
    """Jobs, speeds and layouts are nobody else's business on the controller's host."""
    before = os.umask(0o022)
    try:
        store = Store.open(tmp_path / "store.sqlite")
        modes = {path.name: path.stat().st_mode & 0o077 for path in tmp_path.iterdir()}
        store.close()
    finally:
        os.umask(before)
    assert len(modes) >= 3 and not any(modes.values()), modes
