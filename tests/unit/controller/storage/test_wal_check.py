"""A log that SQLite would read only half is known for damaged, and one that a kill cut is not."""

import sqlite3
from pathlib import Path

import pytest

from pacekeeper.controller.storage.store import Store
from pacekeeper.controller.storage.wal_check import is_damaged
from pacekeeper.core.errors import HostError
from pacekeeper.core.incidents.operator_orders import Order, OrderKind

HEAD, PAGE = 32, 24 + 4096
COUNT = 6


def order(number: int) -> Order:
    return Order(
        kind=OrderKind.CORDON_NODE,
        subject=f"gpu-{number}",
        said_by="ada",
        reason="x" * 9000,  # three pages
        since_unix_s=1.0,
    )


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A store as a killed controller leaves it, with a transaction of each order in its log."""
    store = Store.open(tmp_path / "whole")
    store.close()
    store = Store.open(tmp_path / "whole")
    for number in range(COUNT):
        store.kept.save_order(order(number))
    path = tmp_path / "store"
    for suffix in ("", "-wal"):
        Path(f"{path}{suffix}").write_bytes(Path(f"{tmp_path}/whole{suffix}").read_bytes())
    store.close()
    return path


def log_of(path: Path) -> Path:
    return Path(f"{path}-wal")


def orders(path: Path) -> int:
    store = Store.open(path)
    try:
        return len(store.orders())
    finally:
        store.close()


def ends(log: bytes) -> list[int]:
    """The frames with which a transaction ends."""
    frames = range((len(log) - HEAD) // PAGE)
    return [i for i in frames if log[HEAD + i * PAGE + 4 : HEAD + i * PAGE + 8] != bytes(4)]


def flipped(log: bytes, at: int) -> bytes:
    return log[:at] + bytes([log[at] ^ 1]) + log[at + 1 :]


def test_a_log_that_was_never_written_back_is_read(killed: Path) -> None:
    assert not is_damaged(log_of(killed).read_bytes())
    assert orders(killed) == COUNT


def test_one_bit_anywhere_before_the_last_transaction_is_damage_and_nothing_is_touched(
    killed: Path,
) -> None:
    log = log_of(killed).read_bytes()
    before, last = (end + 1 for end in ends(log)[-3:-1])  # where the last two begin
    for frame in range(last):
        # Whose a frame is, its end included, could also be left from an older log.
        for at in (0, 5, 17, 30, 4000, *((9,) if frame < before else ())):
            assert is_damaged(flipped(log, HEAD + frame * PAGE + at)), (frame, at)
    for at in range(HEAD):
        assert is_damaged(flipped(log, at)), at
    damaged = flipped(log, HEAD + 4000)
    log_of(killed).write_bytes(damaged)
    for _ in range(2):  # also the second time: SQLite would have dropped the log by then
        with pytest.raises(HostError, match=r"log .*-wal can not be read to its end"):
            Store.open(killed)
    assert log_of(killed).read_bytes() == damaged


def test_what_a_power_failure_leaves_of_the_last_transaction_is_no_damage(killed: Path) -> None:
    log = log_of(killed).read_bytes()
    first = ends(log)[-2] + 1
    for frame in range(first, (len(log) - HEAD) // PAGE):
        assert not is_damaged(flipped(log, HEAD + frame * PAGE + 4000)), frame
        assert not is_damaged(log[: HEAD + frame * PAGE + 100]), frame
    log_of(killed).write_bytes(flipped(log, HEAD + first * PAGE + 4000))
    assert orders(killed) == COUNT - 1


def test_a_log_that_was_begun_anew_has_older_frames_behind_it(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "x", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE t (x)")
    for number in range(5):
        connection.execute("INSERT INTO t VALUES (?)", (number,))
    connection.execute("PRAGMA wal_checkpoint(RESTART)")
    connection.execute("INSERT INTO t VALUES (9)")
    log = (tmp_path / "x-wal").read_bytes()
    connection.close()
    assert not is_damaged(log)
    assert not is_damaged(flipped(log, HEAD + 4000)), "of the only transaction"


@pytest.mark.parametrize("size", [0, 10, HEAD, HEAD + 20, HEAD + PAGE - 1])
def test_what_is_no_log_yet_is_not_damaged(size: int, killed: Path) -> None:
    assert not is_damaged(log_of(killed).read_bytes()[:size])
    assert not is_damaged(bytes(size))
