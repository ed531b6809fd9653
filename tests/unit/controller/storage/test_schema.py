"""A store of an older version is taken over whole, with a copy kept; what can not be is refused."""

import json
import sqlite3
from pathlib import Path

import pytest

from pacekeeper.controller.storage import sqlite_file
from pacekeeper.controller.storage.schema import (
    APPLICATION_ID,
    OLDEST_VERSION,
    UPGRADES,
)
from pacekeeper.controller.storage.store import Store
from pacekeeper.controller.storage.tables import SCHEMA_VERSION
from pacekeeper.core.errors import HostError, VersionError
from pacekeeper.core.layout.codec import encode_layout
from support.controllers import first_layout
from support.stores import execute

LAYOUT = first_layout()
# As the controllers that wrote schema 8 made them.
FIRST_TABLES = """
CREATE TABLE jobs (
    name TEXT PRIMARY KEY, newest_generation INTEGER NOT NULL, step INTEGER NOT NULL,
    layout BLOB, layout_reason TEXT NOT NULL, desired BLOB, home BLOB, ranks TEXT NOT NULL,
    life INTEGER NOT NULL, is_makeshift INTEGER NOT NULL);
CREATE TABLE layouts (
    job TEXT NOT NULL, generation INTEGER NOT NULL, layout BLOB NOT NULL, reason TEXT NOT NULL,
    PRIMARY KEY (job, generation));
CREATE TABLE incidents (
    incident_id INTEGER PRIMARY KEY, job TEXT NOT NULL, kind TEXT NOT NULL, tier TEXT NOT NULL,
    rank INTEGER, slowdown REAL, onset_step INTEGER NOT NULL, step INTEGER NOT NULL,
    reason TEXT NOT NULL, opened_unix_s REAL NOT NULL, closed_unix_s REAL, closed_step INTEGER,
    actions TEXT NOT NULL, cause TEXT NOT NULL, probe TEXT NOT NULL, role TEXT NOT NULL);
CREATE TABLE decisions (
    job TEXT NOT NULL, step INTEGER NOT NULL, rung TEXT NOT NULL, reason TEXT NOT NULL,
    current_step_s REAL NOT NULL, planned_step_s REAL NOT NULL, fluid_step_s REAL NOT NULL,
    cost_s REAL NOT NULL, moved_bytes INTEGER NOT NULL);
"""


def older_store(path: Path, version: int) -> None:
    """With a job, a layout, an incident, two decisions; of 11 and later also the copy's name."""
    connection = sqlite3.connect(path)
    connection.executescript(FIRST_TABLES)
    layout = encode_layout(LAYOUT)
    connection.execute(
        "INSERT INTO jobs VALUES ('moe', 3, 70, ?, 'why', NULL, NULL, ?, 5, 0)",
        (layout, json.dumps([[0, 41, "alive"]])),
    )
    connection.execute("INSERT INTO layouts VALUES ('moe', 2, ?, 'it pays')", (layout,))
    connection.execute(
        "INSERT INTO incidents VALUES (7, 'moe', 'device', 'probable', 1, 1.6, 3, 5, 'slow', 9.5,"
        " NULL, NULL, '[\"told\"]', 'heat', '', '')"
    )
    connection.execute(
        "INSERT INTO incidents VALUES (6, 'moe', 'device', 'probable', 2, 1.6, 3, 5, 'slow', 9.5,"
        " NULL, NULL, ?, 'nothing seen: no thread times; not unusual: loss, SM clock;"
        " not told: fan speed', '', '')",
        (json.dumps(["moved", "persistent: it has lasted more than 100 steps"]),),
    )
    for step in (8, 9):
        connection.execute(
            f"INSERT INTO decisions VALUES ('moe', {step}, 'nothing', 'r', 1, 1, 1, 0, 0)"
        )
    for older in range(8, version):
        connection.executescript(UPGRADES[older])
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {version}")
    if 11 <= version < 16:
        connection.execute("UPDATE copy SET name = 'abc', term = 4")
    connection.commit()
    connection.close()


def schema(path: Path) -> list[tuple[str, ...]]:
    """Tables, columns and indexes, whatever their text."""
    connection = sqlite3.connect(path)
    found = []
    for kind, name in connection.execute("SELECT type, name FROM sqlite_master").fetchall():
        what = 'name, type, pk, CASE pk WHEN 0 THEN "notnull" END' if kind == "table" else "name"
        columns = connection.execute(f"SELECT {what} FROM pragma_{kind}_info('{name}')").fetchall()
        found.append((kind, name, *map(str, columns)))
    connection.close()
    return sorted(found)


def test_every_version_that_can_be_taken_over_has_a_way_on() -> None:
    assert list(UPGRADES) == list(range(OLDEST_VERSION, SCHEMA_VERSION))


@pytest.mark.parametrize("version", range(OLDEST_VERSION, SCHEMA_VERSION))
def test_an_older_store_keeps_all_it_had_and_becomes_like_a_new_one(
    tmp_path: Path, version: int
) -> None:
    path = tmp_path / "store"
    older_store(path, version)
    store = Store.open(path)
    (job,), (lasting, incident), next_id = store.load()
    assert (job.name, job.step, job.layout, job.run_id) == ("moe", 70, LAYOUT, 5)
    assert (incident.incident_id, incident.finding.cause, next_id) == (7, "heat", 8)
    assert (incident.rank_failures, incident.nodes) == ((), ())
    assert (incident.is_persistent, lasting.is_persistent) == (False, True)
    assert incident.finding.normal_signals == incident.finding.missing_signals == ()
    assert lasting.finding.cause == "nothing seen: no thread times"
    assert lasting.finding.normal_signals == ("loss", "SM clock")
    assert lasting.finding.missing_signals == ("fan speed",)
    assert store.layout("moe", 2) == (LAYOUT, "it pays")
    assert store.open_proposals() == ((), 1) and store.orders() == () and store.strikes() == {}
    assert store.next_term() == (5 if version >= 11 else 0)
    store.close()
    steps = sqlite3.connect(path).execute("SELECT step FROM decisions ORDER BY decision_id")
    assert steps.fetchall() == [(8,), (9,)]
    Store.open(tmp_path / "new").close()
    assert schema(path) == schema(tmp_path / "new")


def test_a_copy_of_the_older_store_is_kept_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "store"
    older_store(path, 12)
    Store.open(path).close()
    kept = tmp_path / "store.schema-12"
    connection = sqlite3.connect(kept)
    assert connection.execute("PRAGMA user_version").fetchone() == (12,)
    assert connection.execute("SELECT count(*) FROM decisions").fetchone() == (2,)
    assert kept.stat().st_mode & 0o077 == 0


def test_a_take_over_that_fails_leaves_the_older_store_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store"
    older_store(path, 11)
    monkeypatch.setitem(UPGRADES, 12, UPGRADES[12] + "CREATE TABLE jobs (x);")
    with pytest.raises(HostError, match="jobs already exists"):
        Store.open(path)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (11,)
    assert connection.execute("SELECT * FROM decisions").fetchone()[0] == "moe"
    connection.close()
    monkeypatch.undo()
    Store.open(path).close()


def test_a_store_from_before_the_oldest_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "store"
    older_store(path, 8)
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {OLDEST_VERSION - 1}")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(VersionError, match=f"schema {OLDEST_VERSION - 1}, .* reads"):
        Store.open(path)
    assert path.read_bytes() == before


def test_what_is_free_in_an_older_store_can_return_to_the_disk_from_then_on(
    tmp_path: Path,
) -> None:
    path = tmp_path / "store"
    older_store(path, 12)
    store = Store.open(path)
    size = 3 * (sqlite_file.SLACK_BYTES + (1 << 20))
    execute(store, f"INSERT INTO job_timelines VALUES ('j', zeroblob({size}), 1.0)")
    execute(store, "DELETE FROM job_timelines")
    while store.database.give_back():
        pass
    store.close()
    assert path.stat().st_size < 2 * sqlite_file.SLACK_BYTES
