"""What only the shared store has: a server that may be away, and a fence."""

import asyncio
import contextlib
import time
from functools import partial
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from pacekeeper.controller.ha import leader_election
from pacekeeper.controller.ha.leader_election import OPEN_WITHIN_S
from pacekeeper.controller.ha.lease import ElectionMember, Record, Timing
from pacekeeper.controller.ha.lease_renewer import AwayError, LeaseRenewer
from pacekeeper.controller.ha.lease_row import LeaseRow
from pacekeeper.controller.state.state import JobRecord
from pacekeeper.controller.storage import postgres
from pacekeeper.controller.storage.postgres import (
    MIGRATE_WITHIN_S,
    Fence,
    FencedError,
    PostgresDatabase,
)
from pacekeeper.controller.storage.restore import load_state
from pacekeeper.controller.storage.schema import POSTGRES_UPGRADES
from pacekeeper.controller.storage.sqlite_file import DamagedError
from pacekeeper.controller.storage.store import Store
from pacekeeper.controller.storage.store_thread import StoreThread, deadline
from pacekeeper.controller.storage.tables import SCHEMA_VERSION, STRIKES
from pacekeeper.core.errors import HostError, VersionError
from support.controllers import first_layout
from support.ports import free_port

LIMIT_S = 5.0
PATIENCE_S = 30.0


def test_a_server_that_is_away_is_no_damage_and_no_bug() -> None:
    """A leader that opens its store resigns then; a standby keeps what it has read."""
    store = Store(PostgresDatabase(f"postgresql://nobody@127.0.0.1:{free_port()}/none"))
    for read in (partial(load_state, store, 0.0), partial(store.incident, 1), store.load):
        with pytest.raises(HostError) as refused:
            read()
        assert not isinstance(refused.value, DamagedError)


def record(term: int, run_id: str, renewals: int = 0) -> Record:
    return Record(
        term=term, holder=run_id, run_id=run_id, address="", duration_s=4.0, renewals=renewals
    )


def fenced(url: str, term: int, run_id: str) -> PostgresDatabase:
    return PostgresDatabase(url, Fence(term=term, run_id=run_id, limit_s=LIMIT_S))


def test_only_the_leader_of_the_newest_term_writes(postgres_url: str) -> None:
    lease = LeaseRow(postgres_url, LIMIT_S)
    PostgresDatabase.open(postgres_url).close()
    assert lease.write(record(1, "a"), None)
    assert not lease.write(record(1, "b"), None), "there is one"
    first, other_run = fenced(postgres_url, 1, "a"), fenced(postgres_url, 1, "b")
    with first.begin() as connection:
        connection.execute(sa.select(STRIKES))
        assert lease.write(record(1, "a", 1), record(1, "a")), "a renewal does not wait"
    with pytest.raises(FencedError), other_run.begin():
        pass
    assert not lease.write(record(2, "b"), record(1, "a")), "it was renewed since"
    assert lease.write(record(2, "b"), record(1, "a", 1))
    with pytest.raises(FencedError), first.begin():
        pass
    with fenced(postgres_url, 2, "b").begin():
        pass
    for one in (first, other_run, lease):
        one.close()


def test_a_connection_that_fails_a_call_serves_no_other(postgres_url: str) -> None:
    """It may stay open and fail all further calls: then a standby would never take over."""
    PostgresDatabase.open(postgres_url).close()
    lease = LeaseRow(postgres_url, LIMIT_S)
    assert lease.write(record(1, "a"), None)
    assert lease._connection is not None
    lease._connection.pgconn.send_query(b"SELECT pg_sleep(60)")
    with pytest.raises(AwayError):
        lease.read()
    assert lease.read() == record(1, "a")
    database = fenced(postgres_url, 1, "a")
    with pytest.raises(sa.exc.DBAPIError), database.begin() as connection:
        assert database._live is not None
        database._live.pgconn.send_query(b"SELECT pg_sleep(60)")
        connection.execute(sa.select(STRIKES))
    with database.begin() as connection:
        connection.execute(sa.select(STRIKES))
    for one in (lease, database):
        one.close()


def test_a_takeover_ends_a_transaction_that_the_server_does_not_end(postgres_url: str) -> None:
    """Its own limit depends on its clock: set back by an hour, it would end it an hour later."""
    PostgresDatabase.open(postgres_url).close()
    lease = LeaseRow(postgres_url, LIMIT_S)
    assert lease.write(record(1, "a"), None)
    frozen = PostgresDatabase(postgres_url, Fence(term=1, run_id="a", limit_s=1000.0))
    with pytest.raises(sa.exc.DBAPIError), frozen.begin() as connection:
        assert lease.write(record(1, "a", 1), record(1, "a")), "a renewal ends nothing"
        assert not lease.write(record(2, "b"), record(1, "a")), "it was renewed since"
        connection.execute(sa.select(STRIKES))
        assert lease.write(record(2, "b"), record(1, "a", 1))
        connection.execute(sa.select(STRIKES))
    for one in (frozen, lease):
        one.close()


@pytest.mark.parametrize("pause", ["SELECT 1", "SELECT pg_sleep(60)"])
def test_the_server_ends_a_transaction_that_exceeds_its_limit(
    postgres_url: str, pause: str
) -> None:
    """One that is idle, and one whose statement runs on."""
    PostgresDatabase.open(postgres_url).close()
    lease = LeaseRow(postgres_url, LIMIT_S)
    assert lease.write(record(1, "a"), None)
    lease.close()
    database = PostgresDatabase(postgres_url, Fence(term=1, run_id="a", limit_s=0.5))
    give_up_s = time.monotonic() + 60.0
    with pytest.raises(sa.exc.DBAPIError), database.begin() as connection:
        connection.execute(sa.text(pause))
        while is_in_transaction(postgres_url):
            assert time.monotonic() < give_up_s, "it is never ended"
        connection.execute(sa.select(STRIKES))
    database.close()


def is_in_transaction(url: str) -> bool:
    what = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database()"
    return bool(execute_sql(url, f"{what} AND application_name LIKE 'pacekeeper-%'"))


OLDER = "ALTER TABLE jobs RENAME COLUMN baseline TO home; UPDATE pacekeeper_schema SET version = 15"
UPGRADE = "ALTER TABLE jobs RENAME COLUMN home TO baseline; CREATE INDEX by_step ON jobs (step)"


@pytest.fixture
def older(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database of version 15, as it might have been, with a job; leader `a` leads in term 1."""
    store = Store.open(postgres_url)
    store.save_job(
        JobRecord(
            name="train",
            newest_generation=3,
            step=5,
            layout=first_layout(),
            layout_reason="it began so",
            desired=None,
            baseline=None,
        )
    )
    store.close()
    execute_sql(postgres_url, OLDER)
    lease = LeaseRow(postgres_url, LIMIT_S)
    assert lease.write(record(1, "a"), None)
    lease.close()
    monkeypatch.setitem(POSTGRES_UPGRADES, SCHEMA_VERSION - 1, UPGRADE)
    return postgres_url


def execute_sql(url: str, statement: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url) as connection:
        done = connection.execute(statement.encode())
        return done.fetchall() if done.description else []


def test_current_tables_are_opened_although_a_frozen_controller_holds_the_migration_lock(
    postgres_url: str,
) -> None:
    PostgresDatabase.open(postgres_url).close()
    with psycopg.connect(postgres_url) as frozen:
        frozen.execute(f"SELECT pg_advisory_xact_lock({postgres._MIGRATION_LOCK})".encode())
        database = PostgresDatabase(postgres_url)
        with contextlib.closing(database), deadline(PATIENCE_S, database.cut):
            database.prepare()


def migrate(url: str, fence: Fence | None) -> None:
    with contextlib.closing(PostgresDatabase(url, fence)) as database:
        database.prepare()


def test_every_version_of_postgresql_that_can_be_taken_over_has_a_way_on() -> None:
    assert list(POSTGRES_UPGRADES) == list(range(16, SCHEMA_VERSION))


def test_a_leader_migrates_an_older_database_and_keeps_a_copy(older: str) -> None:
    migrate(older, Fence(term=1, run_id="a", limit_s=LIMIT_S))
    (job,), _, _ = (store := Store.open(older)).load()
    store.close()
    assert (job.name, job.step, job.layout) == ("train", 5, first_layout())
    kept = execute_sql(older, "SELECT name, step, home FROM pacekeeper_schema_15.jobs")
    assert kept == [("train", 5, None)]
    version = "SELECT version FROM pacekeeper_schema_15.pacekeeper_schema"
    assert execute_sql(older, version) == [(15,)]
    migrate(older, Fence(term=1, run_id="a", limit_s=LIMIT_S))  # has nothing more to do


def test_the_copy_of_an_earlier_migration_is_not_touched(older: str) -> None:
    execute_sql(older, "CREATE SCHEMA pacekeeper_schema_15")
    with pytest.raises(HostError, match="a schema pacekeeper_schema_15") as refused:
        migrate(older, Fence(term=1, run_id="a", limit_s=LIMIT_S))
    assert "rename it" in str(refused.value.remedy)
    assert execute_sql(older, "SELECT version FROM pacekeeper_schema") == [(15,)]
    execute_sql(older, "ALTER SCHEMA pacekeeper_schema_15 RENAME TO kept")
    migrate(older, Fence(term=1, run_id="a", limit_s=LIMIT_S))


@pytest.mark.parametrize(
    ("is_older", "limit_s"), [(True, MIGRATE_WITHIN_S), (False, OPEN_WITHIN_S)]
)
def test_a_takeover_has_longer_for_a_migration_than_for_anything_else(
    older: str, monkeypatch: pytest.MonkeyPatch, is_older: bool, limit_s: float
) -> None:
    if not is_older:
        migrate(older, Fence(term=1, run_id="a", limit_s=LIMIT_S))
    limits: list[tuple[str, float]] = []

    class Thread(StoreThread):
        async def run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
            limits.append((function.__name__, self.limit_s))
            return await super().run(function, *args, **kwargs)

    monkeypatch.setattr(leader_election, "StoreThread", Thread)
    member = ElectionMember(
        name="a", run_id="a", address="", timing=Timing(duration_s=8.0, renew_s=1.0, margin_s=1.0)
    )
    leadership = leader_election.LeaseLeadership(Leading(), 1, member)
    store, _ = asyncio.run(leader_election.open_store(older, leadership, asyncio.Event()))
    store.close()
    assert limits == [
        *(("needs_migration", 8.0), ("prepare", limit_s)),
        ("load_state", OPEN_WITHIN_S),
    ]


class Leading(LeaseRenewer):
    """Leads in term 1."""

    def __init__(self) -> None:
        """No thread runs."""

    def term(self) -> int | None:
        return 1

    def show_alive(self) -> None:
        """The loop runs."""


@pytest.mark.parametrize(
    ("fence", "error"),
    [
        (None, VersionError),
        (Fence(term=1, run_id="b", limit_s=LIMIT_S), HostError),
    ],
    ids=["standby", "former leader"],
)
def test_only_the_leader_migrates(older: str, fence: Fence | None, error: type[Exception]) -> None:
    with pytest.raises(error):
        migrate(older, fence)
    assert_is_unchanged(older)


@pytest.mark.parametrize(
    "step", ["CREATE TABLE jobs (x text)", "SELECT pg_terminate_backend(pg_backend_pid())"]
)
def test_a_migration_that_fails_leaves_the_database_as_it_was(
    older: str, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setitem(POSTGRES_UPGRADES, SCHEMA_VERSION - 1, f"{UPGRADE}; {step}")
    with pytest.raises(HostError):
        migrate(older, Fence(term=1, run_id="a", limit_s=LIMIT_S))
    assert_is_unchanged(older)
    monkeypatch.setitem(POSTGRES_UPGRADES, SCHEMA_VERSION - 1, UPGRADE)
    migrate(older, Fence(term=1, run_id="a", limit_s=LIMIT_S))


def assert_is_unchanged(url: str) -> None:
    assert execute_sql(url, "SELECT version FROM pacekeeper_schema") == [(15,)]
    assert execute_sql(url, "SELECT home FROM jobs") == [(None,)]
    assert execute_sql(url, "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'pace%'") == []
