"""Trace files as JSON lines: written by agents, read by `pacekeeper replay`.

The first line is the header, each other line one fact, `kind` first (wrapped here for print):

    {"kind": "header", "format": "pacekeeper-trace", "version": 1, "job": "j", "life": 7,
     "node": "n"}
    {"kind": "attached", "rank": 0, "world_size": 4, "role": "train", "clock": "cuda", ...}
    {"kind": "micro_batch", "rank": 0, "step": 7, "compute_s": 0.25, "tokens": 1280, ...}
    {"kind": "device", "device_uuid": "GPU-1", "sampled_s": 81.5, "sm_clock_mhz": 1980.0, ...}
    {"kind": "host", "sampled_s": 81.5, "load_1min": 3.2, ...}

Fields are those of `core.telemetry.records`, of Attachment, and of DeviceSample, HostSample and
DeviceHealth (an object, `health`) in `core.telemetry.samples`. A field with its default, and one
that was not measured, is omitted. One file holds one run of one job on one node; its times are of
that node's monotonic clock.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from typing import Any

from pacekeeper.core.layout.pipeline_schedule import parse_schedule
from pacekeeper.core.telemetry.attachment import Attachment, Clock, ModelShape
from pacekeeper.core.telemetry.records import (
    CheckpointRecord,
    ExpertLoadRecord,
    MicroBatchRecord,
    PairRecord,
    PlanAppliedRecord,
    PlanRefusedRecord,
    ProbeRecord,
    RankExitRecord,
    Record,
    SnapshotRecord,
    StepRecord,
)
from pacekeeper.core.telemetry.samples import DeviceHealth, DeviceSample, HostSample

FORMAT, VERSION = "pacekeeper-trace", 1
SUFFIX = ".trace.jsonl"
KINDS: dict[str, type[Any]] = {
    "micro_batch": MicroBatchRecord,
    "step": StepRecord,
    "expert_load": ExpertLoadRecord,
    "plan_applied": PlanAppliedRecord,
    "plan_refused": PlanRefusedRecord,
    "rank_exit": RankExitRecord,
    "probe": ProbeRecord,
    "pair": PairRecord,
    "checkpoint": CheckpointRecord,
    "snapshot": SnapshotRecord,
    "device": DeviceSample,
    "host": HostSample,
}
Sample = DeviceSample | HostSample
Fact = Attachment | Record | Sample
MAX_INT = (1 << 64) - 1  # of a record's fields
NOT_REPORTED = -1.0  # in a column of times: no time is
_values_of = dict[str, Any].values
_decoded = json.JSONDecoder().raw_decode  # a third of the time of json.loads is around it
_KIND_OF = {made: kind for kind, made in KINDS.items()}
_RUN_ID_NAME = "life"  # in a file
_JOB_FIELDS = ("job", "run_id")  # stored once, in the header
_LISTS = ("counts", "processes", "xids")  # of whole numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """The job, its run ID and the node of a trace file."""

    job: str
    run_id: int = 0
    node: str = ""


def header_line(header: TraceHeader) -> str:
    """The first line of a file, without its newline."""
    values = asdict(header)
    values[_RUN_ID_NAME] = values.pop("run_id")
    return _line({"kind": "header", "format": FORMAT, "version": VERSION, **values})


def attached_line(attachment: Attachment) -> str:
    """The attachment of a rank, without the fields of the header."""
    values = _set_fields(attachment)
    for name in _JOB_FIELDS:
        values.pop(name, None)
    return _line({"kind": "attached", **values})


def record_line(record: Record | Sample) -> str:
    """One record or one sample of the node."""
    return _line({"kind": _KIND_OF[type(record)], **_set_fields(record)})


def parse_header(text: str) -> TraceHeader:
    """Parse a file's first line.

    Raises:
        ValueError: it is not a header of this format; the message gives the reason.
    """
    values = parse_object(text)
    if values.get("kind") != "header" or values.get("format") != FORMAT:
        raise ValueError(f"not a {FORMAT} file: its first line is no header")
    if values.get("version") != VERSION:
        raise ValueError(f"{FORMAT} version {values.get('version')}, this side reads {VERSION}")
    values["run_id"] = values.pop(_RUN_ID_NAME, 0)
    wanted = {
        field.name: values[field.name] for field in fields(TraceHeader) if field.name in values
    }
    return _made(TraceHeader, wanted)  # type: ignore[no-any-return]


def parse_object(text: str) -> dict[str, Any]:
    """Parse one line as a JSON object.

    Raises:
        ValueError: the line is not a JSON object.
    """
    try:
        value, end = _decoded(text)
    except (json.JSONDecodeError, RecursionError):
        end = -1
    if end != len(text):  # no JSON, or blanks around it
        value = _loaded(text)
    return _object_value(value, "a line")


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from None


def parse_fact(values: Mapping[str, Any], header: TraceHeader) -> Fact:
    """The record, sample or attachment of a parsed line.

    Args:
        values: the line's values by name.
        header: of the file; it supplies job and run ID of attachments.

    Raises:
        ValueError: the values are invalid; the message gives the reason.
    """
    given = dict(values)
    kind = given.pop("kind", None)
    if kind == "attached":
        given |= {"job": header.job, "run_id": header.run_id}
        model = given.get("model")
        if model is not None:
            model = dict(_object_value(model, "model"))
            if model.get("schedule") is not None:
                model["schedule"] = parse_schedule(model["schedule"])
            given["model"] = _made(ModelShape, model)
        given["clock"] = Clock(given.get("clock", Clock.WALL))
        return _made(Attachment, given)  # type: ignore[no-any-return]
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r:.40}")
    given = _with_tuples(given)
    if given.get("health") is not None:
        health = _with_tuples(_object_value(given["health"], "health"))
        given["health"] = _made(DeviceHealth, health)
    return _made(KINDS[kind], given)  # type: ignore[no-any-return]


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(value) if name in _LISTS and isinstance(value, list) else value
        for name, value in values.items()
    }


def parse_columns(kind: str, lines: Sequence[dict[str, Any]]) -> dict[str, Sequence[Any]] | None:
    """The values of many lines of one kind by field; a missing value is -1.0 or the field's
    default.

    Returns:
        The columns; None if `parse_fact` rejects one of the lines, or might: it takes one line at a
        time and gives the reason.
    """
    expected, names = _expected(kind), tuple(lines[0])
    if not expected.keys() | {"kind"} >= set(names):
        return None
    if all(tuple(values) == names for values in lines):
        given = dict(zip(names, zip(*map(_values_of, lines), strict=True), strict=True))
    elif all(values.keys() <= expected.keys() | {"kind"} for values in lines):
        given = {
            name: tuple(values.get(name, default) for values in lines)
            for name, (_, default) in expected.items()
        }
    else:
        return None
    columns: dict[str, Sequence[Any]] = {}
    for name, (types, default) in expected.items():
        columns[name] = given.get(name, (default,) * len(lines))
        if not types.issuperset(map(type, columns[name])):
            return None
    return columns


@cache
def _expected(kind: str) -> dict[str, tuple[frozenset[type], Any]]:
    """The types of each field, and its value where a line omits it (None: required)."""
    of_type: dict[Any, tuple[type, ...]] = {
        int: (int,), bool: (bool,), float: (int, float), float | None: (int, float),
    }  # fmt: skip
    return {
        field.name: (
            frozenset(of_type.get(field.type, (list,))),
            NOT_REPORTED
            if field.default is None
            else None
            if field.default is MISSING
            else field.default,
        )
        for field in fields(KINDS[kind])
    }


def _set_fields(value: Any) -> dict[str, Any]:
    """The fields that differ from their defaults, by name; for `health` and `model` likewise."""
    given = asdict(value)
    if isinstance(value, DeviceSample) and value.health is not None:
        given["health"] = _set_fields(value.health)
    if isinstance(value, Attachment) and value.model is not None:
        given["model"] = _set_fields(value.model)
    return {
        field.name: given[field.name]
        for field in fields(value)
        if field.default is MISSING or getattr(value, field.name) != field.default
    }


def _line(values: dict[str, Any]) -> str:
    return json.dumps(values, separators=(",", ":"))


def _object_value(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what}: expected an object, got {type(value).__name__}")
    return value


def _made(kind: type[Any], values: dict[str, Any]) -> Any:
    """An instance of `kind`, each value checked against its field's type; unknown fields are
    rejected.
    """
    types = {field.name: field.type for field in fields(kind)}
    for name, value in values.items():
        if name not in types:
            raise ValueError(f"{name}: no such field")
        wanted = types[name]
        if wanted in (int, str, bool) and type(value) is not wanted:
            raise ValueError(f"{name}: expected {wanted.__name__}, got {value!r:.40}")
        if wanted == bool | None and type(value) is not bool:
            raise ValueError(f"{name}: expected true or false, got {value!r:.40}")
        if wanted == int | None and type(value) is not int:
            raise ValueError(f"{name}: expected a whole number, got {value!r:.40}")
        if wanted in (float, float | None) and (
            isinstance(value, bool) or not isinstance(value, int | float)
        ):
            raise ValueError(f"{name}: expected a number, got {value!r:.40}")
        if isinstance(value, int) and abs(value) > MAX_INT:
            raise ValueError(f"{name}: a number beyond 64 bits")
        if name in _LISTS and not (isinstance(value, tuple) and _are_whole(value)):
            raise ValueError(f"{name}: expected whole numbers")
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(str(error).partition(" ")[2]) from None


def _are_whole(values: tuple[Any, ...]) -> bool:
    return all(type(value) is int and abs(value) <= MAX_INT for value in values)
