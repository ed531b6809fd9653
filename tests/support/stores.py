"""Statements of tests on an open store, past its own tables' names."""

from typing import Any

import sqlalchemy as sa

from pacekeeper.controller.storage.store import Store


def execute(store: Store, statement: str, **values: Any) -> list[tuple[Any, ...]]:
    """Run one statement as the store's own connection would; its rows."""
    is_read = statement.startswith(("SELECT", "PRAGMA"))
    with store.connected() if is_read else store.database.begin() as connection:
        done = connection.execute(sa.text(statement), values)
        return [tuple(row) for row in done] if done.returns_rows else []
