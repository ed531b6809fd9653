"""The one definition of the store's tables, for SQLite and PostgreSQL.

A change of a table raises `SCHEMA_VERSION` and adds the step from the version before to
`schema.py`. Types close the traps of two engines: PostgreSQL's `REAL` has 4 bytes and its `INTEGER`
stops at 2^31, and its default collation sorts otherwise than SQLite.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    DDLElement,
    Double,
    Executable,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.schema import CreateIndex, CreateTable
from sqlalchemy.types import TypeEngine

SCHEMA_VERSION = 16
LEASE = "controller"  # the lease's name

_WHOLE = BigInteger().with_variant(Integer(), "sqlite")  # INTEGER: its key is the row's number
_REAL: TypeEngine[Any] = Double().with_variant(sqlite.REAL(), "sqlite")
_TEXT = Text().with_variant(Text(collation="C"), "postgresql")

METADATA = MetaData()


def _text(name: str, **options: Any) -> Column[Any]:
    return Column(name, _TEXT, nullable=False, **options)


def _whole(name: str, **options: Any) -> Column[Any]:
    return Column(name, _WHOLE, **{"nullable": False, **options})


def _real(name: str, **options: Any) -> Column[Any]:
    return Column(name, _REAL, **{"nullable": False, **options})


def _blob(name: str, **options: Any) -> Column[Any]:
    return Column(name, LargeBinary, **{"nullable": False, **options})


def _number(name: str) -> Column[Any]:
    """A key that the controller counts."""
    return _whole(name, primary_key=True, autoincrement=False)


JOBS = Table(
    "jobs",
    METADATA,
    _text("name", primary_key=True),
    _whole("newest_generation"),
    _whole("step"),
    _blob("layout", nullable=True),
    _text("layout_reason"),
    _blob("desired", nullable=True),
    _blob("baseline", nullable=True),
    _text("ranks"),
    _whole("run_id"),
    _whole("is_provisional"),
)
LAYOUTS = Table(
    "layouts",
    METADATA,
    _text("job", primary_key=True),
    _number("generation"),
    _blob("layout"),
    _text("reason"),
    _real("unix_s"),
)
INCIDENTS = Table(
    "incidents",
    METADATA,
    _number("incident_id"),
    _text("job"),
    _text("kind"),
    _text("tier"),
    _whole("rank", nullable=True),
    _real("slowdown", nullable=True),  # NULL: not a number
    _whole("onset_step"),
    _whole("step"),
    _text("reason"),
    _real("opened_unix_s"),
    _real("closed_unix_s", nullable=True),
    _whole("closed_step", nullable=True),
    _text("actions"),
    _text("cause"),
    _text("probe"),
    _text("role"),
    _text("rank_failures"),
    _text("nodes"),
    _whole("is_persistent"),
    _text("normal_signals"),
    _text("missing_signals"),
)
DECISIONS = Table(
    "decisions",
    METADATA,
    _number("decision_id"),
    _real("unix_s"),
    _text("job"),
    _whole("step"),
    _text("level"),
    _text("reason"),
    _real("current_step_s"),
    _real("planned_step_s"),
    _real("fluid_step_s"),
    _real("cost_s"),
    _whole("moved_bytes"),
)
PROPOSALS = Table(
    "proposals",
    METADATA,
    _number("proposal_id"),
    _text("job"),
    _text("answer"),
    _text("level"),
    _text("reason"),
    _real("current_step_s"),
    _real("planned_step_s"),
    _real("fluid_step_s"),
    _real("cost_s"),
    _whole("moved_bytes"),
    _blob("plan"),
    _blob("base"),
    _text("slow"),
    _text("incident_ids"),
    _real("made_unix_s"),
    _real("expires_unix_s"),
    _text("operator"),
    _text("note"),
)
INCIDENT_TIMELINES = Table(
    "incident_timelines", METADATA, _number("incident_id"), _text("job"), _blob("timeline")
)
JOB_TIMELINES = Table(
    "job_timelines",
    METADATA,
    _text("job", primary_key=True),
    _blob("timeline"),
    _real("newest_unix_s"),
)
ORDERS = Table(
    "orders",
    METADATA,
    _text("kind", primary_key=True),
    _text("subject", primary_key=True),
    _text("operator"),
    _text("reason"),
    _real("since_unix_s"),
    _whole("run_id"),
)
STRIKES = Table(
    "strikes",
    METADATA,
    _number("incident_id"),
    _text("node"),
    _text("device_uuid"),
    _text("job"),
    _text("kind"),
    _real("slowdown"),
    _real("unix_s"),
)
# Of PostgreSQL: which controller may command. Changing `term`, part of a key, conflicts with the
# FOR KEY SHARE of a write transaction; a renewal does not. Of SQLite: the last term, if any.
LEASES = Table(
    "leases",
    METADATA,
    _text("name", primary_key=True),
    _whole("term"),
    _text("run_id"),  # of one start of a controller; empty: released
    _text("holder"),
    _text("address"),
    _real("duration_s"),
    _whole("min_term"),
    _whole("renewals"),
    UniqueConstraint("name", "term"),
)
# What retention asks for, oldest first: a column behind a blob is read through all of the blob.
Index("layouts_by_age", LAYOUTS.c.unix_s, LAYOUTS.c.job, LAYOUTS.c.generation)
Index(
    "incidents_by_age",
    INCIDENTS.c.closed_unix_s,
    sqlite_where=INCIDENTS.c.closed_unix_s.is_not(None),
    postgresql_where=INCIDENTS.c.closed_unix_s.is_not(None),
)
Index("decisions_by_age", DECISIONS.c.unix_s)
Index("proposals_by_age", PROPOSALS.c.made_unix_s, PROPOSALS.c.answer)
Index("job_timelines_by_age", JOB_TIMELINES.c.newest_unix_s)


def create_statements() -> str:
    """The SQL that makes all tables and indexes in an empty SQLite file."""
    dialect = sqlite.dialect()
    made: list[DDLElement] = [CreateTable(table) for table in METADATA.sorted_tables]
    made += [CreateIndex(index) for table in METADATA.sorted_tables for index in table.indexes]
    return ";\n".join(str(one.compile(dialect=dialect)) for one in made) + ";"


@cache
def upsert(table: Table, dialect: str) -> Executable:
    """The statement that inserts a row, or replaces the one of the same key: `row` names all."""
    insert = sqlite.insert(table) if dialect == "sqlite" else postgresql.insert(table)
    return insert.on_conflict_do_update(
        index_elements=list(table.primary_key),
        set_={c.name: insert.excluded[c.name] for c in table.c if not c.primary_key},
    )


def storable(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as both engines store it: no NUL in a text, NULL for what is not a number.

    PostgreSQL refuses the first, SQLite changes the second.
    """
    return {name: _storable(value) for name, value in row.items()}


def _storable(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("\0", "\ufffd")
    return None if isinstance(value, float) and value != value else value
