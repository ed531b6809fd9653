"""A copy is the leader's store under its own name, at any moment; a full disk ends no standby."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pacekeeper.controller.ha import leader_election
from pacekeeper.controller.ha.replica import SET_ASIDE, Replica
from pacekeeper.controller.storage.store import Store
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.security import TlsConfig
from pacekeeper.core.errors import HostError
from support.agents import until
from support.replication import replicating


def name_in(path: Path) -> str:
    with closing(sqlite3.connect(path)) as connection:
        (name,) = connection.execute("SELECT name FROM copy").fetchone()
    return str(name)


def test_a_standby_that_is_killed_meanwhile_never_has_the_name_of_its_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has the store of that name may lead at once: with an old one, beside the living."""

    async def scene() -> None:
        async with replicating(tmp_path / "leader") as (store, _, _, port):
            path = tmp_path / "standby" / "store"
            copy = Replica(path, lambda _: None)

            def killed(_: Path) -> Store:
                raise HostError("killed as the snapshot lay there", remedy="")

            monkeypatch.setattr(Store, "open", killed)
            with pytest.raises(HostError, match="killed"):
                await copy.follow(f"127.0.0.1:{port}", "b", TlsConfig())
            assert name_in(path) not in ("", store.copy[0])

    asyncio.run(scene())


def test_what_can_not_be_stored_is_said_and_the_copy_of_before_stays(tmp_path: Path) -> None:
    async def scene() -> None:
        async with replicating(tmp_path / "leader") as (store, copies, keeper, port):
            path, stood = tmp_path / "standby" / "store", list[str | None]()
            Store.open(path).close()
            before = name_in(path)
            copy = Replica(path, stood.append)
            (path.parent / "store.incoming").mkdir()  # as a full disk: no file can be there
            with pytest.raises(HostError, match=r"copy in .* can not be kept"):
                await copy.follow(f"127.0.0.1:{port}", "b", TlsConfig())
            assert stood == [before] and copy.name == before

            (path.parent / "store.incoming").rmdir()
            address = f"127.0.0.1:{port}"
            following = asyncio.create_task(copy.follow(address, "b", TlsConfig()))
            await until(lambda: keeper.named and len(keeper.named[-1]) == 2, "it is in sync")
            with store.transaction():
                store.forget_job("x")
            await copies.ship(store.journal.taken())
            following.cancel()
            copy.close()
            assert stood[1:] == [name_in(path)] == [keeper.named[-1][1]]
            assert name_in(Path(f"{path}{SET_ASIDE}")) == before

    asyncio.run(scene())


def test_a_standby_that_can_not_store_stands_by_and_tries_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leader_election, "STORE_AGAIN_S", 0.0)
    tried = list[str]()

    async def follow(address: str, *_: Any) -> str:
        tried.append(address)
        raise HostError("no space left", remedy="give it room")

    async def scene() -> None:
        leader = SimpleNamespace(record=SimpleNamespace(life="theirs", address="a:1"))
        this: Any = SimpleNamespace(life="ours", name="b")
        copy: Any = SimpleNamespace(follow=follow)
        following = asyncio.create_task(
            leader_election._follow(ControllerConfig(), leader, this, copy)  # type: ignore[arg-type]
        )
        await until(lambda: len(tried) > 2, "it is tried again")
        assert not following.done()
        following.cancel()

    asyncio.run(scene())
    assert caplog.text.count("no space left") == 1, "on change only"
