"""Micro-batches as columns: what thousands of ranks tell of a step, without a value for each. Pure.

To make a record of each and to look at them one by one cost a controller more than to judge them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import chain
from typing import Any, Self

from pacekeeper.core.telemetry.records import MicroBatchRecord

COLUMNS = tuple(field.name for field in fields(MicroBatchRecord))
DEFAULTS = {
    field.name: field.default for field in fields(MicroBatchRecord) if field.default is not MISSING
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchTable:
    """Rows are micro-batches of one job, at least one; `columns` by the names of MicroBatchRecord's
    fields, equally long. One that is not there holds in each row what a record has by default.
    """

    columns: Mapping[str, Sequence[Any]]

    def __len__(self) -> int:
        return len(self.columns["rank"])

    def column(self, name: str) -> Sequence[Any]:
        """The values of one field, row by row."""
        told = self.columns.get(name)
        return [DEFAULTS[name]] * len(self) if told is None else told

    def rows(self, rows: Sequence[int]) -> Self:
        """A table of these rows, at least one."""
        return type(self)(
            columns={name: [told[row] for row in rows] for name, told in self.columns.items()}
        )

    def of_rank(self, rank: int) -> Iterator[MicroBatchRecord]:
        """Its micro-batches as records, in order."""
        ranks = self.columns["rank"]
        if rank in ranks:
            yield from self.rows([row for row, one in enumerate(ranks) if one == rank]).records()

    def records(self) -> Iterator[MicroBatchRecord]:
        """A record of each row."""
        for row in zip(*self.columns.values(), strict=True):
            yield MicroBatchRecord(**dict(zip(self.columns, row, strict=True)))

    def by_step(self, *, most: int) -> Iterator[tuple[int, Self]]:
        """A table of each of the newest `most` steps. Nearly always it is one."""
        steps = self.columns["step"]
        if steps.count(steps[0]) == len(steps):
            yield steps[0], self
            return
        found: dict[int, list[int]] = {}
        for row, step in enumerate(steps):
            found.setdefault(step, []).append(row)
        for step in sorted(found)[-most:]:
            yield step, self.rows(found[step])


def table_from_records(records: Sequence[MicroBatchRecord]) -> MicroBatchTable:
    """These micro-batches, at least one, row by row."""
    columns = {name: [getattr(record, name) for record in records] for name in COLUMNS}
    return MicroBatchTable(columns=columns)


def chain_column(tables: Sequence[MicroBatchTable], name: str) -> Iterator[Any]:
    """One column of all tables, one after the other."""
    return chain.from_iterable(table.column(name) for table in tables)
