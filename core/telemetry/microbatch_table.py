"""Micro-batches as columns: the reports of thousands of ranks without one object per row.

The wire decoder makes tables and the controller judges steps on them; one record per row would cost
more than the judging.
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
    """Micro-batches of one job, at least one, as equally long columns named like MicroBatchRecord's
    fields.

    A missing column has the record's default in every row.
    """

    columns: Mapping[str, Sequence[Any]]

    def __len__(self) -> int:
        return len(self.columns["rank"])

    def column(self, name: str) -> Sequence[Any]:
        """The values of one field, row by row."""
        values = self.columns.get(name)
        return [DEFAULTS[name]] * len(self) if values is None else values

    def rows(self, rows: Sequence[int]) -> Self:
        """A table of these rows, at least one."""
        return type(self)(
            columns={name: [values[row] for row in rows] for name, values in self.columns.items()}
        )

    def of_rank(self, rank: int) -> Iterator[MicroBatchRecord]:
        """The micro-batches of `rank` as records, in order."""
        ranks = self.columns["rank"]
        if rank in ranks:
            yield from self.rows([row for row, one in enumerate(ranks) if one == rank]).records()

    def records(self) -> Iterator[MicroBatchRecord]:
        """Each row as a record."""
        for row in zip(*self.columns.values(), strict=True):
            yield MicroBatchRecord(**dict(zip(self.columns, row, strict=True)))

    def by_step(self, *, most: int) -> Iterator[tuple[int, Self]]:
        """(step, table) for each of the newest `most` steps; nearly always there is one step."""
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
    """The table of these micro-batches, at least one, row by row."""
    columns = {name: [getattr(record, name) for record in records] for name in COLUMNS}
    return MicroBatchTable(columns=columns)


def chain_column(tables: Sequence[MicroBatchTable], name: str) -> Iterator[Any]:
    """The values of one column of all tables, one table after the other."""
    return chain.from_iterable(table.column(name) for table in tables)
