"""Stores of standbys, and what can go wrong with them; a leader's snapshot."""

from collections.abc import Callable
from pathlib import Path

from pacekeeper.controller.storage import replica_marker
from pacekeeper.controller.storage.store import Store
from pacekeeper.core.incidents.operator_orders import OperatorOrder, OrderKind

OLD, FRESH = "old", "fresh"


def saved(store: Store, count: int) -> None:
    for number in range(count):
        order = OperatorOrder(
            kind=OrderKind.CORDON_NODE, subject=f"gpu-{number}", operator="ada", reason="x" * 9000,
            since_unix_s=1.0,
        )  # fmt: skip
        store.history_tables.save_order(order)


def snapshot(folder: Path) -> bytes:
    """Of a leader."""
    store = Store.open(folder / "leader")
    saved(store, 3)
    store.name_copy("leaders", 4)
    data = store.journal.snapshot()
    store.close()
    return data


def spoil_pages(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    path.write_bytes(data)


def spoil_rows(path: Path) -> None:
    """It can be opened: a text is there that means nothing."""
    store = Store.open(path)
    store._raw.execute("UPDATE orders SET kind = 'ghost'")
    store.close()


def spoil_whole(path: Path) -> None:
    path.write_text("no database any more " * 1000)


def old_copy(path: Path, spoil: Callable[[Path], None] = lambda _: None) -> Path:
    """A store of the name `OLD`, with a mark of that."""
    store = Store.open(path)
    saved(store, 2)
    store.name_copy(OLD, 3)
    store.close()
    spoil(path)
    replica_marker.write_marker(path, OLD)
    return path
