"""A backup is whole, its owner's only, made while the store is used, and over no other file."""

import os
import sqlite3
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from pacekeeper.cli.admin.backup import command
from pacekeeper.controller.storage.store import Store
from pacekeeper.core.errors import HostError
from pacekeeper.core.incidents.operator_orders import OperatorOrder, OrderKind


def backed_up(store: Path, to: Path) -> str:
    """What it says. Raises what it raises."""
    done = CliRunner().invoke(command, [str(store), str(to)])
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
    assert restored.copy[0] != store.copy[0], "it can not lead for the one that has all"
    assert restored.copy[1] == store.copy[1]
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
