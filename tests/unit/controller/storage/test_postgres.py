"""What only the shared store has: a server that may be away, and a fence."""

from functools import partial

import pytest
import sqlalchemy as sa

from pacekeeper.controller.ha.lease import Record
from pacekeeper.controller.ha.lease_renewer import AwayError
from pacekeeper.controller.ha.lease_row import LeaseRow
from pacekeeper.controller.storage.postgres import Fence, FencedError, PostgresDatabase
from pacekeeper.controller.storage.restore import load_state
from pacekeeper.controller.storage.sqlite_file import DamagedError
from pacekeeper.controller.storage.store import Store
from pacekeeper.controller.storage.tables import STRIKES
from pacekeeper.core.errors import HostError
from support.ports import free_port

LIMIT_S = 5.0


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
    lease, hasty = LeaseRow(postgres_url, LIMIT_S), LeaseRow(postgres_url, 0.6)
    assert lease.write(record(1, "a"), None)
    frozen = PostgresDatabase(postgres_url, Fence(term=1, run_id="a", limit_s=1000.0))
    with pytest.raises(sa.exc.DBAPIError), frozen.begin() as connection:
        assert lease.write(record(1, "a", 1), record(1, "a")), "a renewal ends nothing"
        connection.execute(sa.select(STRIKES))
        with pytest.raises(AwayError):
            hasty.write(record(2, "b"), record(1, "a", 1))
        assert hasty.write(record(2, "b"), record(1, "a", 1))
        connection.execute(sa.select(STRIKES))
    for one in (frozen, lease, hasty):
        one.close()


def test_a_term_begins_after_the_transactions_of_the_one_before(postgres_url: str) -> None:
    """A transaction that stays open is ended by the server."""
    PostgresDatabase.open(postgres_url).close()
    lease = LeaseRow(postgres_url, LIMIT_S)
    assert lease.write(record(1, "a"), None)
    first = PostgresDatabase(postgres_url, Fence(term=1, run_id="a", limit_s=0.5))
    with pytest.raises(sa.exc.DBAPIError), first.begin() as connection:
        assert lease.write(record(2, "b"), record(1, "a")), "after the server ended the first"
        connection.execute(sa.select(STRIKES))
    for one in (first, lease):
        one.close()
