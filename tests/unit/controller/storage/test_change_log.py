"""A copy that is given a store's changes holds the same rows, and can be told nothing but rows."""

import resource
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.controller.storage.change_log import Change
from pacekeeper.controller.storage.store import Store
from pacekeeper.core.errors import HostError
from pacekeeper.core.incidents.findings import (
    Decision,
    Finding,
    FindingKind,
    Incident,
    MitigationLevel,
    Tier,
)


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


def all_rows(store: Store) -> dict[str, list[Any]]:
    """Every table but the one that holds the copy's own name."""
    execute = store.journal.execute
    names = execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name != 'copy'")
    return {
        name: execute(f"SELECT * FROM {name} ORDER BY 1, 2").fetchall()
        for (name,) in names.fetchall()
    }


def decide(store: Store, step: int, num_bytes: int = 10) -> None:
    """Append one decision: to execute it twice makes two rows."""
    decision = Decision(level=MitigationLevel.NOTHING, layout=None, reason="r" * num_bytes)
    store.save_decision("j", step, decision, 1760000000.0)


@contextmanager
def full_disk(store: Store) -> Iterator[None]:
    """SQLITE_FULL: SQLite rolls the transaction back by itself."""
    (pages,) = store.journal.execute("PRAGMA page_count").fetchone()
    (most,) = store.journal.execute("PRAGMA max_page_count").fetchone()
    store.journal.execute(f"PRAGMA max_page_count = {pages + 8}")
    try:
        yield
    finally:
        store.journal.execute(f"PRAGMA max_page_count = {most}")


@contextmanager
def failing_log(store: Store) -> Iterator[None]:
    """SQLITE_IOERR_WRITE, at COMMIT or when the page cache is full: rolled back by SQLite, too."""
    store.journal.execute("PRAGMA cache_size = 5")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (store.log_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def denied_commit(store: Store) -> Iterator[None]:
    """COMMIT fails and leaves the transaction open."""

    def judge(action: int, argument: str | None, *_: str | None) -> int:
        denied = action == sqlite3.SQLITE_TRANSACTION and argument == "COMMIT"
        return sqlite3.SQLITE_DENY if denied else sqlite3.SQLITE_OK

    store._raw.set_authorizer(judge)
    try:
        yield
    finally:
        store._raw.set_authorizer(None)


@contextmanager
def nothing_fails(store: Store) -> Iterator[None]:
    """The statements of the block fail by themselves."""
    yield


def write_much(store: Store) -> None:
    for step in range(2):
        decide(store, step, 200_000)


def violate_a_constraint(store: Store) -> None:
    store.journal.execute("INSERT INTO jobs (name) VALUES (NULL)")


def raise_an_error(store: Store) -> None:
    raise ZeroDivisionError


def swallow_the_error(store: Store) -> None:
    """The caller goes on after SQLite has ended its transaction."""
    with pytest.raises(sqlite3.OperationalError):
        write_much(store)
    decide(store, 3)


def do_nothing(store: Store) -> None:
    pass


@pytest.mark.parametrize(
    ("failure", "then", "error", "code"),
    [
        (full_disk, write_much, sqlite3.OperationalError, sqlite3.SQLITE_FULL),
        (full_disk, swallow_the_error, sqlite3.OperationalError, None),
        (failing_log, write_much, sqlite3.OperationalError, sqlite3.SQLITE_IOERR_WRITE),
        (failing_log, do_nothing, sqlite3.OperationalError, sqlite3.SQLITE_IOERR_WRITE),
        (denied_commit, do_nothing, sqlite3.DatabaseError, sqlite3.SQLITE_AUTH),
        (nothing_fails, violate_a_constraint, sqlite3.IntegrityError, None),
        (nothing_fails, raise_an_error, ZeroDivisionError, None),
    ],
)
def test_a_transaction_that_failed_changes_neither_the_store_nor_its_copy(
    tmp_path: Path,
    failure: Callable[[Store], Any],
    then: Callable[[Store], None],
    error: type[Exception],
    code: int | None,
) -> None:
    """As the controller writes: each attempt begins anew, until one succeeds."""
    leader, copy = Store.open(tmp_path / "leader"), Store.open(tmp_path / "copy")
    leader.journal.is_kept = True
    with leader.transaction():
        decide(leader, 0)
    copy.follow(leader.journal.taken())
    for _ in range(4):
        with failure(leader), pytest.raises(error) as caught, leader.transaction():
            decide(leader, 1)
            decide(leader, 2)
            then(leader)
        if code is not None:
            assert isinstance(caught.value, sqlite3.Error)
            assert caught.value.sqlite_errorcode == code
    decide(leader, 4)  # outside of a transaction: committed by itself
    with leader.transaction():
        decide(leader, 5)
    changes = leader.journal.taken()
    copy.follow(changes)
    assert [change.values[2] for change in changes] == [4, 5]
    assert [row[3] for row in all_rows(leader)["decisions"]] == [0, 4, 5]
    assert all_rows(copy) == all_rows(leader)
    for store in (leader, copy):
        store.close()


def test_changes_of_an_open_transaction_are_not_shipped(tmp_path: Path) -> None:
    leader = Store.open(tmp_path / "leader")
    leader.journal.is_kept = True
    with leader.transaction():
        decide(leader, 1)
        assert leader.journal.taken() == ()
        decide(leader, 2)
    assert [change.values[2] for change in leader.journal.taken()] == [1, 2]
    leader.close()


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
