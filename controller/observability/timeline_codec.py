"""Encodes timelines of incidents and jobs for the store: compressed JSON."""

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, fields
from math import isfinite, nan
from typing import Any

from pacekeeper.controller.observability.timeline import (
    IncidentRow,
    IncidentTimeline,
    JobRow,
    Note,
    PlanNote,
)
from pacekeeper.controller.storage.rows import LARGE, real, text, whole
from pacekeeper.core.incidents.findings import ConsideredLayout, MitigationLevel
from pacekeeper.core.telemetry.sign_of_life import RankStack

FORMAT = 1
MOST_BYTES = 8 << 20  # of one, unpacked: a damaged row can not ask for more


def encode_incident_timeline(timeline: IncidentTimeline) -> bytes:
    """Encode the timeline of an incident."""
    return _packed(
        {
            "format": FORMAT,
            "incident_id": timeline.incident_id,
            "job": timeline.job,
            "rank": timeline.rank,
            "left_steps": timeline.left_steps,
            "rows": _plain_rows(timeline.rows),
            "plans": [asdict(note) for note in timeline.plans],
            "notes": [[note.step, note.unix_s, note.text] for note in timeline.notes],
            "stacks": [[one.rank, one.source, one.text] for one in timeline.stacks],
        }
    )


def decode_incident_timeline(data: bytes) -> IncidentTimeline:
    """Decode the timeline of an incident. Raises ValueError if damaged."""
    document = _unpacked(data)
    try:
        return IncidentTimeline(
            incident_id=whole(document["incident_id"], LARGE),
            job=text(document["job"]),
            rank=_perhaps(whole, document["rank"]),
            left_steps=_perhaps(int, document["left_steps"]),
            rows=[_incident_row(row) for row in document["rows"]],
            plans=[_plan(plain) for plain in document["plans"]],
            notes=[
                Note(step=whole(step), unix_s=real(unix_s), text=text(words))
                for step, unix_s, words in document["notes"]
            ],
            stacks=[
                RankStack(rank=whole(rank), source=text(source), text=text(words))
                for rank, source, words in document.get("stacks", ())
            ],
        )
    except (TypeError, KeyError, IndexError, OverflowError) as error:
        raise ValueError(f"no timeline of an incident: {error!r:.200}") from None


def encode_job_timeline(rows: Sequence[JobRow]) -> bytes:
    """Encode the timeline of a job."""
    return _packed({"format": FORMAT, "rows": _plain_rows(rows)})


def decode_job_timeline(data: bytes) -> list[JobRow]:
    """Decode the timeline of a job. Raises ValueError if damaged."""
    document = _unpacked(data)
    try:
        return [_pace_row(row) for row in document["rows"]]
    except (TypeError, KeyError, IndexError, OverflowError) as error:
        raise ValueError(f"no timeline of a job: {error!r:.200}") from None


def _plain_rows(rows: Sequence[IncidentRow] | Sequence[JobRow]) -> list[list[float | None]]:
    return [[value if isfinite(value) else None for value in astuple(row)] for row in rows]


def _incident_row(plain: Any) -> IncidentRow:
    return IncidentRow(**_values(plain, IncidentRow))


def _pace_row(plain: Any) -> JobRow:
    return JobRow(**_values(plain, JobRow))


def _values(plain: Any, kind: type[IncidentRow] | type[JobRow]) -> dict[str, Any]:
    names = [field.name for field in fields(kind)]
    if len(plain) != len(names):
        raise TypeError(f"a row of {len(plain)} values")
    values: dict[str, Any] = {}
    for name, value in zip(names, plain, strict=True):
        is_whole = name in ("step", "num_steps", "generation")
        values[name] = whole(value) if is_whole else nan if value is None else real(value)
    return values


def _plan(plain: Any) -> PlanNote:
    considered = tuple(
        ConsideredLayout(level=_level(one), why_not=text(one["why_not"]), **_prices(one))
        for one in plain["considered"]
    )
    return PlanNote(
        step=whole(plain["step"]),
        unix_s=real(plain["unix_s"]),
        level=_level(plain),
        reason=text(plain["reason"]),
        generation=_perhaps(whole, plain["generation"]),
        current_step_s=real(plain["current_step_s"]),
        fluid_step_s=real(plain["fluid_step_s"]),
        considered=considered,
        **_prices(plain),
    )


def _level(plain: Any) -> MitigationLevel:
    return MitigationLevel(plain["level"] if "level" in plain else plain["rung"])  # its old name


def _prices(plain: Any) -> dict[str, Any]:
    return {
        "planned_step_s": real(plain["planned_step_s"]),
        "cost_s": real(plain["cost_s"]),
        "moved_bytes": whole(plain["moved_bytes"], LARGE),
    }


def _perhaps(read: Callable[[Any], int], value: Any) -> int | None:
    return None if value is None else read(value)


def _packed(document: dict[str, Any]) -> bytes:
    return zlib.compress(json.dumps(document, allow_nan=False).encode(), 6)


def _unpacked(data: bytes) -> Any:
    try:
        unpacker = zlib.decompressobj()
        told = unpacker.decompress(data, MOST_BYTES)
        if not unpacker.eof or unpacker.unused_data:
            raise ValueError("it is cut, too large, or something follows it")
        document = json.loads(told)
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']!r:.20}, not {FORMAT}")
    except (zlib.error, RecursionError, UnicodeDecodeError, TypeError, KeyError) as error:
        raise ValueError(f"not what was stored: {error!r:.200}") from None
    return document
