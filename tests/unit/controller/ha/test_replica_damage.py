"""A damaged copy leads nowhere: it is set aside for a fresh one, whoever is killed meanwhile; what
is no copy is refused as ever.
"""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.controller.ha.replica import DAMAGED, SET_ASIDE, Replica
from pacekeeper.controller.storage import replica_marker
from pacekeeper.controller.storage.sqlite_file import DamagedError
from pacekeeper.controller.storage.store import Store
from pacekeeper.core.config.security import TlsConfig
from pacekeeper.core.errors import HostError
from support.agents import until
from support.damaged_copies import (
    FRESH,
    OLD,
    old_copy,
    saved,
    snapshot,
    spoil_pages,
    spoil_whole,
)
from support.replication import PaperKeeper, replicating


@pytest.mark.parametrize("spoil", [spoil_pages, spoil_whole])
def test_a_damaged_copy_does_not_stand_and_stays_until_a_whole_one_has_come(
    tmp_path: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path, stood = old_copy(tmp_path / "store", spoil), list[str | None]()
    before = {file: file.read_bytes() for file in tmp_path.glob("store*")}
    copy = Replica(path, stood.append)
    assert stood == [None] and copy.name == OLD
    assert "damage" in copy.damage or "not a database" in copy.damage
    assert "takes a fresh one" in copy.damage and len(copy.damage.splitlines()) == 1
    assert {file: file.read_bytes() for file in before} == before, "nothing is thrown away"

    data = snapshot(tmp_path)
    for damaged in (b"\0" * 8192, data[:-4096] + b"\xa5" * 4096):
        with pytest.raises(HostError, match="what the leader sent is damaged"):
            copy._install(damaged, FRESH, 4)
    assert {file: file.read_bytes() for file in before} == before
    assert stood == [None]

    copy._install(data, FRESH, 4)
    assert (stood[1:], copy.damage, replica_marker.read_marker(path)) == ([FRESH], "", FRESH)
    copy.close()
    for file, data in before.items():
        if not file.name.endswith((replica_marker.MARK, ".lock")):
            kept = Path(str(file).replace("store", f"store{DAMAGED}"))
            assert kept.read_bytes() == data, file
    (said,) = caplog.messages
    assert "is a fresh copy" in said and f"store{DAMAGED}" in said


@pytest.mark.parametrize("spoil", [spoil_pages, spoil_whole])
def test_a_store_that_was_led_or_came_from_nobody_is_refused_as_ever(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    path, stood = old_copy(tmp_path / "store", spoil), list[str | None]()
    replica_marker.remove_marker(path)
    with pytest.raises(DamagedError):
        Replica(path, stood.append)
    assert stood == []


def test_only_the_newest_damaged_one_is_kept(tmp_path: Path) -> None:
    path, data = old_copy(tmp_path / "store", spoil_whole), snapshot(tmp_path)
    copy = Replica(path, lambda _: None)
    copy._install(data, FRESH, 4)
    copy.close()
    spoil_pages(path)
    second = path.read_bytes()
    copy = Replica(path, lambda _: None)
    copy._install(data, "again", 4)
    copy.close()
    kept = sorted(file.name for file in tmp_path.glob(f"store{DAMAGED}*"))
    assert kept == [f"store{DAMAGED}"], "no log of another store beside it"
    assert Path(f"{path}{DAMAGED}").read_bytes() == second


@pytest.mark.parametrize("gone", [Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_copy_that_is_gone_is_no_store_without_a_past(
    tmp_path: Path, gone: Callable[[Path], None]
) -> None:
    path, stood = old_copy(tmp_path / "store"), list[str | None]()
    gone(path)
    assert "gone or empty" in Replica(path, stood.append).damage
    assert stood == [None]


def test_an_empty_file_that_is_no_copy_begins_without_a_past(tmp_path: Path) -> None:
    path, stood = tmp_path / "store", list[str | None]()
    path.touch()
    Replica(path, stood.append).close()
    assert len(stood) == 1 and stood[0]


def test_a_disk_that_can_not_be_read_is_no_damage(tmp_path: Path) -> None:
    """It may mend."""
    path = tmp_path / "store"
    replica_marker.write_marker(path, OLD)
    path.mkdir()
    with pytest.raises(HostError, match="unable to open") as caught:
        Replica(path, lambda _: None)
    assert not isinstance(caught.value, DamagedError)


def test_what_is_known_to_be_damaged_is_not_opened_again(tmp_path: Path) -> None:
    """The check at the opening would not find it."""
    path, stood = old_copy(tmp_path / "store"), list[str | None]()
    copy = Replica(path, stood.append, "what it says means nothing")
    ended = asyncio.run(copy.follow("127.0.0.1:1", "b", TlsConfig()))
    assert ended.startswith("UNAVAILABLE") and stood == [None]


def test_a_fresh_copy_that_is_damaged_at_once_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, stood = old_copy(tmp_path / "store"), list[str | None]()
    copy, data = Replica(path, stood.append), snapshot(tmp_path)

    def spoilt(_: Path) -> Store:
        raise DamagedError("a bad disk")

    monkeypatch.setattr(Store, "open", spoilt)
    with pytest.raises(HostError, match="a bad disk"):
        copy._install(data, FRESH, 4)
    assert stood == [OLD, None] and copy.name == FRESH


def test_another_store_in_its_place_is_no_copy(tmp_path: Path) -> None:
    path, stood = old_copy(tmp_path / "store"), list[str | None]()
    replica_marker.write_marker(path, "of a snapshot that never stood there")
    Replica(path, stood.append).close()
    assert stood == [OLD] and replica_marker.read_marker(path) is None


class Killed(BaseException):
    """Nothing is done any more."""


def dies_before(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the acts that change names on the disk, or make sure of them, so many are done."""
    left = [number]

    def until_then(act: Callable[..., Any]) -> Callable[..., Any]:
        def acts(*values: Any, **more: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return act(*values, **more)

        return acts

    for act in ("replace", "unlink", "fsync"):
        monkeypatch.setattr(os, act, until_then(getattr(os, act)))


@pytest.mark.parametrize("is_damaged", [True, False])
def test_whoever_is_killed_in_between_leads_with_a_whole_store_or_waits_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    """The damaged one is a copy; the other was led."""
    data, before = snapshot(tmp_path), tmp_path / "before"
    if is_damaged:
        old_copy(before / "store", spoil_pages)
    else:
        replica_marker.remove_marker(old_copy(before / "store"))
    seen = set[str | None]()
    for number in range(99):
        stood = list[str | None]()
        path = Path(shutil.copytree(before, tmp_path / str(number))) / "store"
        copy = Replica(path, lambda _: None)
        with monkeypatch.context() as patched:
            dies_before(number, patched)
            try:
                copy._install(data, FRESH, 4)
            except Killed:
                pass
            else:
                break
        copy.close()
        copy = Replica(path, stood.append)
        assert stood[0] in (None, FRESH, *(() if is_damaged else (OLD,))), number
        if stood[0] != FRESH:
            copy._install(data, "again", 5)
            assert stood[-1] == "again", number
        copy.close()
        if is_damaged:
            kept = Path(f"{path}{DAMAGED}")
            assert kept.read_bytes() == (before / "store").read_bytes(), number
        if not is_damaged:
            store = Store.open(Path(f"{path}{SET_ASIDE}"))
            assert store.copy == (OLD, 3), number
            store.close()
        seen |= {stood[0]}
    copy.close()
    assert seen == {None, FRESH, *(() if is_damaged else (OLD,))}, "at all of these moments"


@asynccontextmanager
async def followed(
    folder: Path, path: Path, stood: list[str | None]
) -> AsyncIterator[tuple[Store, Any, PaperKeeper, Replica, "asyncio.Task[str]"]]:
    """A leader, and a standby whose copy counts."""
    async with replicating(folder / "leader") as (store, copies, keeper, port):
        copy = Replica(path, stood.append)
        following = asyncio.create_task(copy.follow(f"127.0.0.1:{port}", "b", TlsConfig()))
        await until(lambda: keeper.named and len(keeper.named[-1]) == 2, "it is in sync")
        yield store, copies, keeper, copy, following
        following.cancel()
        copy.close()


def test_damage_that_is_met_in_a_change_ends_its_standing_and_is_mended_by_the_leader(
    tmp_path: Path,
) -> None:
    path, stood = tmp_path / "standby" / "store", list[str | None]()

    async def scene() -> None:
        async with followed(tmp_path, path, stood) as (store, copies, keeper, copy, following):
            name = copy.name
            assert copy._store is not None
            copy._store._raw.execute("DROP TABLE orders")
            saved(store, 1)
            shipping = asyncio.create_task(copies.ship(store.journal.taken()))
            with pytest.raises(HostError, match=r"is damaged: no such table.*takes a fresh one"):
                await following
            assert stood[-1] is None
            await shipping
            assert keeper.named[-1] == (store.copy[0],), "it counts no more"
            assert copy.name == name, "whose place a fresh one takes"

        async with followed(tmp_path, path, stood) as (store, _, keeper, copy, _):
            assert stood[-1] == copy.name == keeper.named[-1][1] != name
            assert copy._store is not None and len(copy._store.orders()) == 1
            assert Path(f"{path}{SET_ASIDE}").exists()

    asyncio.run(scene())


def test_a_full_disk_leaves_the_damaged_one_and_nothing_half_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, stood = old_copy(tmp_path / "store", spoil_pages), list[str | None]()
    before = path.read_bytes()
    copy = Replica(path, stood.append)
    data = snapshot(tmp_path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            copy._install(data, FRESH, 4)
    assert path.read_bytes() == before and stood == [None]
    assert not (tmp_path / "store.incoming").exists()
    copy._install(data, FRESH, 4)
    assert stood == [None, FRESH]
    copy.close()


def test_no_store_is_replaced_that_another_controller_has_open(tmp_path: Path) -> None:
    path = old_copy(tmp_path / "store", spoil_pages)
    copy, data = Replica(path, lambda _: None), snapshot(tmp_path)
    path.unlink()
    other = Store.open(path)
    with pytest.raises(HostError, match="in use by another controller"):
        copy._install(data, FRESH, 4)
    assert not Path(f"{path}{DAMAGED}").exists()
    other.close()
