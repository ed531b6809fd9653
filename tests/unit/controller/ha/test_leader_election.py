"""Who wins the lease leads with a whole store only, and tells nobody anything before the record
names that store and no other.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.controller.app.controller import Controller
from pacekeeper.controller.ha import leader_election
from pacekeeper.controller.ha.replica import Replica
from pacekeeper.controller.storage import replica_marker
from pacekeeper.controller.storage.sqlite_file import DamagedError
from pacekeeper.controller.storage.store import Store
from pacekeeper.core.config.controller import ControllerConfig
from support.damaged_copies import FRESH, OLD, old_copy, snapshot, spoil_pages, spoil_rows


class Keeper:
    """A lease on paper, led in term 5, whose store does not answer."""

    def __init__(self) -> None:
        self.stood = list[str | None]()
        self.set_eligible = self.stood.append

    def term(self) -> int:
        return 5

    async def set_wanted_replicas(self, _: tuple[str, ...]) -> None:
        await asyncio.Event().wait()

    def resign(self) -> None:
        self.stood.append("resigned")


def leading(path: Path, keeper: Keeper, stop_after_s: float) -> str:
    config = ControllerConfig(store=str(path), listen="127.0.0.1:0", metrics_listen="")

    async def scene() -> str:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(stop_after_s, stop.set)
        on_paper: Any = keeper
        return await leader_election._lead(config, on_paper, 5, stop)

    return asyncio.run(scene())


@pytest.mark.parametrize("spoil", [spoil_pages, spoil_rows])
def test_who_wins_with_a_damaged_copy_gives_up_and_with_its_own_store_ends(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    path, keeper = old_copy(tmp_path / "store", spoil), Keeper()
    damage = leading(path, keeper, 20.0)
    assert "is damaged" in damage
    assert keeper.stood == [None] and replica_marker.read_marker(path) == OLD
    # Though it can be opened it does not stand again before there is a fresh one.
    copy = Replica(path, keeper.set_eligible, damage)
    assert keeper.stood == [None, None] and copy.damage.startswith(damage)
    copy._install(snapshot(tmp_path), FRESH, 5)
    assert keeper.stood[2:] == [FRESH]
    copy.close()

    spoil(path)
    replica_marker.remove_marker(path)
    with pytest.raises(DamagedError):
        leading(path, keeper, 20.0)
    with pytest.raises(DamagedError):
        Controller(ControllerConfig(store=str(path)))


def test_nobody_is_served_before_the_record_names_its_store_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else others that have not heard of it might still take over."""
    path = old_copy(tmp_path / "store")
    assert leading(path, Keeper(), 0.2) == ""
    assert "listening" not in capsys.readouterr().out
    store = Store.open(path)
    assert store.copy == (OLD, 5) and replica_marker.read_marker(path) is None
    store.close()
