"""A mark tells a copy, which a leader has whole, from a store that may be all that is left."""

from pathlib import Path

import pytest

from pacekeeper.controller.ha.leadership import Alone
from pacekeeper.controller.ha.replica import Standing, standing
from pacekeeper.controller.storage.replica_marker import MARK, mark, marked, unmark
from pacekeeper.controller.storage.store import Store
from pacekeeper.core.errors import HostError


@pytest.mark.parametrize(
    ("name", "is_there", "is_damaged", "expected"),
    [
        (None, False, False, Standing.STANDS),  # a new one
        (None, True, False, Standing.STANDS),
        (None, True, True, Standing.REFUSED),
        ("b", True, False, Standing.STANDS),
        ("b", True, True, Standing.AWAITS),
        ("b", False, False, Standing.AWAITS),
        ("", True, True, Standing.AWAITS),  # the disk was full as it was written
        ("", False, False, Standing.AWAITS),
    ],
)
def test_only_a_copy_waits_for_a_fresh_one(
    name: str | None, is_there: bool, is_damaged: bool, expected: Standing
) -> None:
    assert standing(name, is_there=is_there, is_damaged=is_damaged) is expected


def test_what_is_led_is_no_copy_any_more_with_a_lease_or_without(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = Store.open(path)
    mark(path, "b")
    assert marked(path) == "b"
    store.name_copy("b", 3)  # as a leader under a lease does
    assert marked(path) is None
    mark(path, "b")
    Alone().opened(store)
    assert marked(path) is None
    store.close()


def test_who_can_not_take_the_mark_away_does_not_lead(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = Store.open(path)
    Path(f"{path}{MARK}").mkdir()
    with pytest.raises(HostError, match=MARK):
        store.name_copy("b", 3)
    assert store.copy[1] == 0
    with pytest.raises(HostError, match=MARK):
        marked(path)
    Path(f"{path}{MARK}").rmdir()
    unmark(path)
    store.close()
