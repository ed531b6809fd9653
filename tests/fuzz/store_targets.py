"""What is fuzzed of a controller's store: its pages and its rows.

Each case is opened, loaded and asked for all that people may ask, by the real code. A store that
opens must have the rows that it had: fewer without a word would be half a past.
"""

import asyncio
import json
import sqlite3
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fuzz.service_seeds import service_seeds
from fuzz.service_targets import AnsweredError, Context
from pacekeeper.controller.api.status_service import StatusService
from pacekeeper.controller.machine.machine import advance
from pacekeeper.controller.observability.timeline_writer import TimelineWriter
from pacekeeper.controller.state.events import Tick
from pacekeeper.controller.storage.restore import restored
from pacekeeper.controller.storage.store import Store
from pacekeeper.controller.storage.tables import create_statements
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.errors import HostError, VersionError
from pacekeeper.core.layout.codec import encode_layout
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.protos import status_pb2

PAGE_BYTES = 512  # as small as can be: more of them to damage
UNIX_S = 1e9
CALLS = ("ListJobs", "ListNodes", "ListIncidents", "ListProposals", "ListOrders")
STATED = (HostError, VersionError, AnsweredError)
Run = tuple[Callable[[bytes], object], tuple[type[Exception], ...]]
Rows = dict[str, list[list[Any]]]


class UnstorableError(ValueError):
    """SQLite takes no such row: no damage brings it into a store."""


class LostRowsError(Exception):
    """A store opens, and has not all its rows."""


def store_targets(folder: Path) -> dict[str, Run]:
    """By name: what runs a case, and the errors it states."""
    place = folder / "stores"
    place.mkdir(exist_ok=True)

    def of_pages(data: bytes) -> object:
        whole = _counts(_rows()) if data else _counts({})  # an empty file is begun anew, and said
        return _used(_put(place, data), (whole,))

    def of_rows(data: bytes) -> object:
        path = _put(place, _empty())
        return _used(path, (_counts(_fill(path, _read(data))),))

    return {
        "store-pages": (of_pages, STATED),
        "store-rows": (of_rows, (*STATED, UnstorableError)),
    }


def store_seeds() -> dict[str, tuple[bytes, ...]]:
    """Of each a valid store."""
    with TemporaryDirectory() as folder:
        path = _put(Path(folder), _empty())
        _fill(path, _rows())
        whole = path.read_bytes()
    told = json.dumps(_rows()).encode()
    return {"store-pages": (whole,), "store-rows": (told,)}


def _used(path: Path, may_be: Sequence[dict[str, int]]) -> object:
    """As a controller does when it starts, and what people ask it then. `may_be`: how many rows
    its tables may have; empty: nobody knows.
    """
    store = Store.open(path)
    try:
        found = _found(path)
        if may_be and found not in may_be:
            raise LostRowsError(f"{found} of {may_be[0]}")
        jobs, incidents, next_id = store.load()
        waiting, next_proposal_id = store.open_proposals()
        state = restored(
            jobs, incidents, next_incident_id=next_id, waiting=waiting,
            next_proposal_id=next_proposal_id, standing=store.orders(), strikes=store.strikes(),
            unix_offset_s=UNIX_S,
        )  # fmt: skip
        if len(state.jobs) != found["jobs"]:
            raise LostRowsError(f"{len(state.jobs)} jobs of {found['jobs']}")
        history = TimelineWriter(store=store)
        history.on_tick(state)
        status = StatusService(state=lambda: state, past_layout=store.layout, history=history)
        told = asyncio.run(_asked(status, list(state.jobs)))
        history._retention.on_tick(1e9, UNIX_S)
        state, _ = advance(state, Tick(), config=ControllerConfig(), now_s=1.0)
        return told
    finally:
        store.close()


async def _asked(status: StatusService, jobs: list[str]) -> list[Any]:
    """All that can be asked; what one question is refused for, others are not."""
    questions: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in CALLS]
    questions += [
        (name, {"job": job, **more})
        for job in jobs
        for name, more in (("GetJob", {}), ("GetPace", {}), ("GetLayout", {"generation": 1}))
    ]
    questions += [("GetExplanation", {"incident_id": number}) for number in (1, 2)]
    told, refused = list[Any](), list[AnsweredError]()
    for name, values in questions:
        request = getattr(status_pb2, f"{name}Request")(**values)
        try:
            answer = await getattr(status, name)(request, Context())
            told.append(answer.SerializeToString())
        except AnsweredError as error:
            refused.append(error)
    if refused and jobs:
        raise refused[0]
    return told


def _found(path: Path) -> dict[str, int]:
    """How many rows each table has, read once through and without its indexes."""
    connection = sqlite3.connect(path)
    try:
        return {
            table: len(connection.execute(f"SELECT * FROM {table} NOT INDEXED").fetchall())
            for table in tables()
        }
    finally:
        connection.close()


@cache
def tables() -> dict[str, list[tuple[str, str]]]:
    """(name, type) of the columns of each table of a new store."""
    connection = sqlite3.connect(":memory:")
    try:
        connection.executescript(create_statements())
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        return {
            name: [(row[1], row[2]) for row in connection.execute(f"PRAGMA table_info({name})")]
            for (name,) in names
        }
    finally:
        connection.close()


def _counts(rows: Rows) -> dict[str, int]:
    return {table: len(rows.get(table, ())) for table in tables()}


def _put(folder: Path, file: bytes) -> Path:
    """A store that nobody has open."""
    path = folder / "store"
    for suffix in ("-shm", "-wal"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    path.write_bytes(file)
    return path


def _read(data: bytes) -> Rows:
    try:
        rows = json.loads(data)
    except (ValueError, RecursionError):
        raise UnstorableError("no JSON") from None
    if not isinstance(rows, dict) or not all(
        name in tables() and isinstance(one, list) and all(isinstance(row, list) for row in one)
        for name, one in rows.items()
    ):
        raise UnstorableError("no rows of tables")
    return rows


def _fill(path: Path, rows: Rows) -> Rows:
    """These rows, written as any program could. Raises UnstorableError."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("BEGIN")
        for table, some in rows.items():
            columns = tables()[table]
            for row in some:
                values = [_stored(*pair) for pair in zip(columns, row, strict=True)]
                marks = ", ".join("?" * len(values))
                connection.execute(f"INSERT INTO {table} VALUES ({marks})", values)
        connection.execute("COMMIT")
    except (sqlite3.Error, ValueError, OverflowError, RecursionError) as error:
        raise UnstorableError(f"no row: {error}") from None
    finally:
        connection.close()
    return rows


def _stored(column: tuple[str, str], value: Any) -> Any:
    """Documents are text or bytes in a column, courses and paces are packed, too."""
    name, kind = column
    if isinstance(value, dict | list):
        value = json.dumps(value)
    if kind == "BLOB" and isinstance(value, str):
        value = value.encode()
    return zlib.compress(value) if name == "timeline" and isinstance(value, bytes) else value


@cache
def _empty() -> bytes:
    """A store of small pages without a row."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        Store.open(path).close()
        connection = sqlite3.connect(path, isolation_level=None)
        for statement in ("journal_mode = DELETE", f"page_size = {PAGE_BYTES}"):
            connection.execute(f"PRAGMA {statement}")
        connection.execute("VACUUM")
        connection.close()
        return path.read_bytes()


@cache
def _rows() -> Rows:
    """One or two of each kind. Documents are not text here: they are damaged by what they mean."""
    known = service_seeds()
    course, pace = (json.loads(known[f"{name}-repacked"][0]) for name in ("course", "pace"))
    layout, plan = _layout(1), _layout(2)
    finding = ["device", "confirmed", 1, 1.5, 3, 4, "slow", 1.0]
    why = ["hot", "none", ""]
    prices = ["move_replicas", "it pays", 1.0, 0.9, 0.8, 1.0, 64]
    deaths = [[[[1, 1], [3, 9]], "killed", 4, 1.0, 2.0, 5], [[[0, 0]], "too", 4, 2.0, None, None]]
    ranks = [[0, 10, "alive"], [1, 11, "dead"]]
    return {
        "jobs": [
            ["moe", 2, 4, layout, "as told", plan, None, ranks, 7, 0],
            ["other", 1, 4, layout, "as told", None, layout, ranks, 7, 1],
        ],
        "layouts": [["moe", 1, layout, "as told", 1.0]],
        "incidents": [
            [1, "moe", *finding, None, None, ["a plan"], *why, [], [], 0, [], []],
            [2, "moe", *finding, 2.0, 5, [], *why, deaths, ["n"], 1, ["power"], ["loss"]],
            [3, "gone", *finding, 2.0, 5, [], *why, [], [], 0, [], []],
        ],
        "decisions": [[1, 1.0, "moe", 4, *prices]],
        "proposals": [
            [at, "moe", answer, *prices, plan, layout, [[1, 1.5]], [1], 1.0, 9.0, "", ""]
            for at, answer in ((1, "denied"), (2, "waiting"))
        ],
        "incident_timelines": [[1, "moe", course]],
        "job_timelines": [["moe", pace, 4.0]],
        "orders": [["cordon_node", "n", "ann", "hot", 1.0, 0], ["pause", "moe", "ann", "", 1.0, 0]],
        "strikes": [[1, "n", "GPU-0", "moe", "device", 1.5, UNIX_S]],
        "leases": [["controller", 3, "", "", "", 4.0, 0, 1]],
    }


def _layout(generation: int) -> Any:
    layout = even_layout(ranks=[0, 1], num_layers=1, num_experts=2, replicas=2)
    return json.loads(encode_layout(replace(layout, generation=generation)))
