"""A mark tells a copy, which a leader has whole, from a store that may be all that is left."""

from pathlib import Path

import pytest

from pacekeeper.controller.ha.leadership import Standalone
from pacekeeper.controller.ha.replica import ReplicaState, replica_state
from pacekeeper.controller.storage.replica_marker import (
    MARK,
    read_marker,
    remove_marker,
    write_marker,
)
from pacekeeper.controller.storage.store import Store
from pacekeeper.core.errors import HostError


@pytest.mark.parametrize(
    ("name", "is_there", "is_damaged", "expected"),
    [
        (None, False, False, ReplicaState.STANDS),  # a new one
        (None, True, False, ReplicaState.STANDS),
        (None, True, True, ReplicaState.REFUSED),
        ("b", True, False, ReplicaState.STANDS),
        ("b", True, True, ReplicaState.AWAITS),
        ("b", False, False, ReplicaState.AWAITS),
        ("", True, True, ReplicaState.AWAITS),  # the disk was full as it was written
        ("", False, False, ReplicaState.AWAITS),
    ],
)
def test_only_a_copy_waits_for_a_fresh_one(
    name: str | None, is_there: bool, is_damaged: bool, expected: ReplicaState
) -> None:
    assert replica_state(name, is_there=is_there, is_damaged=is_damaged) is expected


def test_what_is_led_is_no_copy_any_more_with_a_lease_or_without(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = Store.open(path)
    write_marker(path, "b")
    assert read_marker(path) == "b"
    store.name_copy("b", 3)  # as a leader under a lease does
    assert read_marker(path) is None
    write_marker(path, "b")
    Standalone().opened(store)
    assert read_marker(path) is None
    store.close()


def test_who_can_not_take_the_mark_away_does_not_lead(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = Store.open(path)
    Path(f"{path}{MARK}").mkdir()
    with pytest.raises(HostError, match=MARK):
        store.name_copy("b", 3)
    assert store.copy[1] == 0
    with pytest.raises(HostError, match=MARK):
        read_marker(path)
    Path(f"{path}{MARK}").rmdir()
    remove_marker(path)
    store.close()
