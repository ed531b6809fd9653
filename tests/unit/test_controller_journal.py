"""A copy that is given a store's changes holds the same rows, and can be told nothing but rows."""

import sqlite3
from pathlib import Path

import pytest

from pacekeeper.controller.ha.change_log import Change
from pacekeeper.controller.storage.store import Store
from pacekeeper.core.errors import HostError
from pacekeeper.core.incidents.findings import Finding, FindingKind, Incident, Tier


def incident(number: int) -> Incident:
    finding = Finding(
        kind=FindingKind.DEVICE,
        tier=Tier.PROBABLE,
        rank=1,
        slowdown=1.1 + 1e-16 * number,
        onset_step=1,
        step=2,
        reason="r",
    )
    return Incident(incident_id=number, job="j", finding=finding, opened_unix_s=1760000000.123456)


def rows(store: Store) -> list[tuple[object, ...]]:
    return list(store.journal.execute("SELECT * FROM incidents ORDER BY incident_id"))


def test_a_copy_by_changes_is_a_copy_by_snapshot_bit_for_bit(tmp_path: Path) -> None:
    one, other = Store.open(tmp_path / "a"), Store.open(tmp_path / "b")
    one.journal.is_kept = True
    for number in range(1, 4):
        with one.transaction():
            one.save_incident(incident(number))
        other.follow(one.journal.taken())
    with pytest.raises(ZeroDivisionError), one.transaction():
        one.save_incident(incident(9))
        raise ZeroDivisionError
    assert not one.journal.taken(), "what was rolled back has changed nothing"
    (tmp_path / "c").write_bytes(one.journal.snapshot())
    third = Store.open(tmp_path / "c")
    assert rows(one) == rows(other) == rows(third)
    assert len(rows(one)) == 3
    assert third.copy == one.copy != other.copy, "each has its name, until it is given another"
    for store in (one, other, third):
        store.close()


@pytest.mark.parametrize(
    "statement",
    [
        "ATTACH DATABASE '/tmp/x' AS x",
        "DROP TABLE incidents",
        "PRAGMA user_version = 1",
        "CREATE TABLE x (y)",
        "DELETE FROM sqlite_master",
        "VACUUM",
    ],
)
def test_a_leader_can_change_rows_and_nothing_else(tmp_path: Path, statement: str) -> None:
    store = Store.open(tmp_path / "s")
    with pytest.raises(sqlite3.DatabaseError):
        store.follow([Change(statement=statement, values=())])
    store.close()


def test_a_store_that_was_led_goes_on_in_a_later_term_without_a_lease(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s")
    assert store.next_term() == 0, "there never was one"
    store.name_copy("x", 7)
    assert [store.next_term(), store.next_term()] == [8, 9]
    with pytest.raises(HostError, match="in use"):
        Store.open(tmp_path / "s")
    store.close()
