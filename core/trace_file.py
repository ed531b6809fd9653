"""A recorded run as JSON lines: the format that agents write and `pacekeeper replay` reads. Pure.

The first line is the header, each other line one fact, `kind` first (here broken for print):

    {"kind": "header", "format": "pacekeeper-trace", "version": 1, "job": "j", "life": 7,
     "node": "n"}
    {"kind": "attached", "rank": 0, "world_size": 4, "role": "train", "clock": "cuda", ...}
    {"kind": "micro_batch", "rank": 0, "step": 7, "compute_s": 0.25, "tokens": 1280, ...}

Fields are those of `core.records` and `core.topology.Attachment`; one that was not measured is
left out, as is one that has its default. One file holds one life of one job on one node.
"""

import json
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from pacekeeper.core.records import (
    ExpertLoadRecord,
    MicroBatchRecord,
    PlanAppliedRecord,
    RankExitRecord,
    Record,
    StepRecord,
)
from pacekeeper.core.topology import Attachment, Clock, ModelShape

FORMAT, VERSION = "pacekeeper-trace", 1
SUFFIX = ".trace.jsonl"
KINDS: dict[str, type[Any]] = {
    "micro_batch": MicroBatchRecord,
    "step": StepRecord,
    "expert_load": ExpertLoadRecord,
    "plan_applied": PlanAppliedRecord,
    "rank_exit": RankExitRecord,
}
_KIND_OF = {made: kind for kind, made in KINDS.items()}
_JOB_FIELDS = ("job", "life")  # told once, in the header


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """Whose file it is."""

    job: str
    life: int = 0
    node: str = ""


def header_line(header: TraceHeader) -> str:
    """The first line of a file, without its newline."""
    return _line({"kind": "header", "format": FORMAT, "version": VERSION, **asdict(header)})


def attached_line(attachment: Attachment) -> str:
    """What a rank said of itself, without what the header says."""
    values = _told(attachment)
    for name in _JOB_FIELDS:
        values.pop(name, None)
    return _line({"kind": "attached", **values})


def record_line(record: Record) -> str:
    """One record."""
    return _line({"kind": _KIND_OF[type(record)], **_told(record)})


def parse_header(text: str) -> TraceHeader:
    """The header in a file's first line. Raises ValueError, saying what is wrong with it."""
    values = _object(text)
    if values.get("kind") != "header" or values.get("format") != FORMAT:
        raise ValueError(f"not a {FORMAT} file: its first line is no header")
    if values.get("version") != VERSION:
        raise ValueError(f"{FORMAT} version {values.get('version')}, this side reads {VERSION}")
    wanted = {
        field.name: values[field.name] for field in fields(TraceHeader) if field.name in values
    }
    return _made(TraceHeader, wanted)  # type: ignore[no-any-return]


def parse_line(text: str, header: TraceHeader) -> Attachment | Record:
    """One fact of a file with this header. Raises ValueError, saying what is wrong with it."""
    values = _object(text)
    kind = values.pop("kind", None)
    if kind == "attached":
        values |= {"job": header.job, "life": header.life}
        model = values.get("model")
        if model is not None:
            values["model"] = _made(ModelShape, _object_value(model, "model"))
        values["clock"] = Clock(values.get("clock", Clock.WALL))
        return _made(Attachment, values)  # type: ignore[no-any-return]
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}")
    if isinstance(values.get("counts"), list):
        values["counts"] = tuple(values["counts"])
    return _made(KINDS[kind], values)  # type: ignore[no-any-return]


def _told(value: Any) -> dict[str, Any]:
    """Fields that differ from their defaults, by name."""
    told = asdict(value)
    return {
        field.name: told[field.name]
        for field in fields(value)
        if field.default is MISSING or getattr(value, field.name) != field.default
    }


def _line(values: dict[str, Any]) -> str:
    return json.dumps(values, separators=(",", ":"))


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from None
    return _object_value(value, "a line")


def _object_value(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what}: expected an object, got {type(value).__name__}")
    return value


def _made(kind: type[Any], values: dict[str, Any]) -> Any:
    """`kind` of these values, each checked against its field's type; unknown ones are refused."""
    known = {field.name: field for field in fields(kind)}
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"{name}: no such field")
        wanted = known[name].type
        if wanted in (int, str, bool) and type(value) is not wanted:
            raise ValueError(f"{name}: expected {wanted.__name__}, got {value!r}")
        if wanted in (float, float | None) and (
            isinstance(value, bool) or not isinstance(value, int | float)
        ):
            raise ValueError(f"{name}: expected a number, got {value!r}")
    if "counts" in values and not all(type(count) is int for count in values["counts"]):
        raise ValueError("counts: expected whole numbers")
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(str(error).partition(" ")[2]) from None
