"""A backup is whole, its owner's only, made while the store is used, and over no other file."""

import os
import re
import sqlite3
import stat
import threading
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner

from pacekeeper.cli.admin.store import command
from pacekeeper.controller.ha.lease import Record
from pacekeeper.controller.ha.lease_renewer import AwayError
from pacekeeper.controller.ha.lease_row import LeaseRow
from pacekeeper.controller.storage.store import Store
from pacekeeper.controller.storage.tables import METADATA
from pacekeeper.core.errors import HostError, VersionError
from pacekeeper.core.incidents.operator_orders import OperatorOrder, OrderKind
from support.stores import execute
from support.tree import ROOT


def backed_up(store: Path, to: Path) -> str:
    """What it says. Raises what it raises."""
    return called("backup", str(store), str(to))


def called(*words: str) -> str:
    """What the command prints. Raises what it raises."""
    done = CliRunner().invoke(command, words)
    if done.exception is not None:
        raise done.exception
    return done.output


def order(subject: str) -> OperatorOrder:
    return OperatorOrder(
        kind=OrderKind.CORDON_NODE, subject=subject, operator="ada", reason="fan", since_unix_s=1.0
    )


def test_what_was_stored_is_in_it_also_what_only_the_log_has_and_the_store_is_used_on(
    tmp_path: Path,
) -> None:
    path, to = tmp_path / "a.sqlite", tmp_path / "copy.sqlite"
    store = Store.open(path)
    with store.transaction():
        store.history_tables.save_order(order("gpu-1"))
    before = os.umask(0o022)
    try:
        done = backed_up(path, to)
    finally:
        os.umask(before)
    assert str(to) in done
    assert stat.S_IMODE(to.stat().st_mode) == 0o600
    assert sorted(one.name for one in tmp_path.glob("copy*")) == ["copy.sqlite"], "one file"
    with store.transaction():
        store.history_tables.save_order(order("gpu-2"))
    restored = Store.open(to)
    assert [one.subject for one in restored.orders()] == ["gpu-1"]
    restored.close()
    store.close()


def test_nothing_is_written_over_and_nothing_is_left_behind(tmp_path: Path) -> None:
    Store.open(tmp_path / "a.sqlite").close()
    (tmp_path / "taken").write_text("mine")
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    (tmp_path / "text").write_text("no database " * 100)
    for store, to in (
        ("a.sqlite", "taken"),
        ("none", "new"),
        ("other.sqlite", "new"),
        ("text", "new"),
        ("a.sqlite", "no-folder/new"),
    ):
        with pytest.raises(HostError, match=store if to == "new" else to):
            backed_up(tmp_path / store, tmp_path / to)
    assert (tmp_path / "taken").read_text() == "mine"
    assert not list(tmp_path.glob("new*")) and not (tmp_path / "none").exists()


def rows_of(place: str | Path) -> dict[str, list[tuple[object, ...]]]:
    """All rows of a store."""
    store = Store.open(place)
    with store.connected() as connection:
        found = {
            name: sorted(map(tuple, connection.execute(table.select())), key=repr)
            for name, table in METADATA.tables.items()
        }
    store.close()
    return found


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A store of an older version with rows of all kinds, led last in term 4."""
    path = tmp_path / "old.sqlite"
    with sqlite3.connect(path) as connection:
        connection.executescript(
            (ROOT / "tests/golden/controller/storage/older_store.sql").read_text()
        )
        connection.execute("UPDATE copy SET term = 4")
    connection.close()
    return path


def test_a_store_goes_to_postgresql_and_back_with_all_rows(
    filled: Path, tmp_path: Path, postgres_url: str
) -> None:
    said = called("migrate", str(filled), postgres_url)
    before = rows_of(filled)
    assert all(before.values()), "every table has rows"
    assert f"{sum(map(len, before.values()))} rows, 1 jobs, 2 incidents" in said
    assert rows_of(postgres_url) == before
    back = tmp_path / "back.sqlite"
    called("migrate", postgres_url, f"sqlite:///{back}")
    assert rows_of(back) == before
    copied = tmp_path / "copied.sqlite"
    called("backup", postgres_url, str(copied))
    assert rows_of(copied) == before
    assert stat.S_IMODE(copied.stat().st_mode) == 0o600
    store = Store.open(back)
    assert store.next_term() == 5, "terms go on"
    store.close()


@pytest.mark.parametrize("words", [("check",), ("migrate", "new.sqlite"), ("backup", "new.sqlite")])
def test_an_older_file_stays_as_it_is_whatever_is_read_from_it(
    filled: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(filled.parent)
    before = filled.read_bytes()
    called(words[0], str(filled), *words[1:])
    assert filled.read_bytes() == before
    new = {one.name for one in filled.parent.iterdir()} - {filled.name, f"{filled.name}.lock"}
    assert new <= {"new.sqlite", "new.sqlite.lock"}, "no copy is left"


def test_a_database_that_is_only_read_gets_no_tables(postgres_url: str, tmp_path: Path) -> None:
    for words in (("check",), ("migrate", str(tmp_path / "a")), ("backup", str(tmp_path / "b"))):
        with pytest.raises(HostError, match="no tables"):
            called(words[0], postgres_url, *words[1:])
    with psycopg.connect(postgres_url) as connection:
        found = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        assert found.fetchall() == []


def test_a_file_of_an_unknown_version_is_refused_by_its_own_name(filled: Path) -> None:
    with sqlite3.connect(filled) as connection:
        connection.execute("PRAGMA user_version = 7")
    connection.close()
    with pytest.raises(VersionError, match=rf"{filled} has schema 7"):
        called("check", str(filled))


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    for words in (("check",), ("migrate", str(tmp_path / "new"))):
        with pytest.raises(HostError, match=r"none\.sqlite"):
            called(words[0], str(tmp_path / "none.sqlite"), *words[1:])
    assert not (tmp_path / "none.sqlite").exists()


def test_nothing_is_migrated_into_a_store_that_has_rows(filled: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    store = Store.open(other)
    store.history_tables.save_order(order("n"))
    store.close()
    before = rows_of(other)
    with pytest.raises(HostError, match="not empty"):
        called("migrate", str(filled), str(other))
    assert rows_of(other) == before


def test_a_store_that_is_led_is_not_migrated(tmp_path: Path, postgres_url: str) -> None:
    row = LeaseRow(postgres_url, 5.0)
    with pytest.raises(AwayError):
        row.read()  # makes the tables
    held = Record(term=1, holder="a", run_id="r", address="h:1", duration_s=0.5)
    assert row.write(held, None)
    over = threading.Event()

    def renew() -> None:
        record = held
        while not over.wait(0.05):
            renewed = replace(record, renewals=record.renewals + 1)
            assert row.write(renewed, record)
            record = renewed

    renewing = threading.Thread(target=renew)
    renewing.start()
    try:
        with pytest.raises(HostError, match="leads"):
            called("migrate", postgres_url, str(tmp_path / "new.sqlite"))
    finally:
        over.set()
        renewing.join()
        row.close()
    called("migrate", postgres_url, str(tmp_path / "newer.sqlite"))  # its leader was killed


def test_a_check_reads_every_row_and_names_the_damaged_one(place: str | Path) -> None:
    store = Store.open(place)
    store.history_tables.save_job_timeline("moe", b"no timeline", 1.0)
    store.close()
    with pytest.raises(HostError, match=rf"{re.escape(store.database.name)} .*job_timelines moe"):
        called("check", str(place))
    store = Store.open(place)
    execute(store, "DELETE FROM job_timelines")
    store.close()
    assert "every row can be read" in called("check", str(place))


def test_a_backup_that_can_be_nowhere_says_why(tmp_path: Path) -> None:
    Store.open(tmp_path / "a.sqlite").close()
    with pytest.raises(HostError, match="File name too long"):
        called("backup", str(tmp_path / "a.sqlite"), "x" * 300)
