"""Reads PyTorch profiler (Kineto) traces, one file per rank: device time of each profiler step.

A step's compute is the time in which at least one kernel that is no collective runs on the device;
collectives are left out, since waiting for others hides in them. Without a device it is the time
in operators of the host; without profiler steps all of the recording counts as one.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pacekeeper.core.errors import DataError
from pacekeeper.predictor.trace import Chunk, ComputeTable, Trace, WaitTable, Worker
from pacekeeper.predictor.workload import Array
from pacekeeper.simulator.text_file import text_of

MAX_US = 1e18  # of a moment: some clocks count from 1970
MAX_RANK = 1 << 32
_STEP = re.compile(r"ProfilerStep#(\d{1,15})")
_COLLECTIVE = re.compile(r"nccl|rccl|gloo|c10d|record_param_comms", re.IGNORECASE)
_RANK_IN_NAME = re.compile(r"rank[-_]?(\d{1,9})", re.IGNORECASE)
_PIPELINE = re.compile(r"pipeline|(?<![a-z])pp(?![a-z])", re.IGNORECASE)
_LIST = '"traceEvents"'
_US = 1e-6

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """One file: (step, compute, collectives) in seconds."""

    worker: Worker
    steps: list[tuple[int, float, float]]
    notes: list[str]


def read_kineto(paths: Sequence[Path]) -> Trace:
    """The job whose ranks wrote these files. Raises DataError where none of them can be used.

    Files that can not be read, or that hold nothing that took time, are left out and said.
    """
    notes: list[str] = []
    rows: list[tuple[int, int, float, float]] = []
    workers: dict[int, Worker] = {}
    for path in paths:
        try:
            read = _read_rank(path)
        except DataError as error:
            notes.append(error.what)
            continue
        rank = read.worker.rank
        notes += read.notes
        if rank in workers:
            notes.append(f"{path.name}: rank {rank} again, left out")
            continue
        workers[rank] = read.worker
        rows += [(step, rank, compute_s, wait_s) for step, compute_s, wait_s in read.steps]
    if not rows:
        raise DataError("; ".join(notes[:4]) or "no file")
    rows.sort()
    step = np.array([row[0] for row in rows], dtype=np.intp)
    ranks = np.array([row[1] for row in rows], dtype=np.intp)
    whole = np.zeros(len(rows), dtype=np.intp)
    unknown = np.full(len(rows), np.nan)
    return Trace(
        name=paths[0].absolute().parent.name if len(paths) > 1 else paths[0].name.partition(".")[0],
        source="kineto",
        workers=tuple(workers[rank] for rank in sorted(workers)),
        compute=ComputeTable(
            step=step,
            rank=ranks,
            micro_batch=whole,
            chunk=whole + int(Chunk.WHOLE),
            model_chunk=whole,
            compute_s=np.array([row[2] for row in rows]),
            tokens=unknown,
            sum_len_squared=unknown,
            expert_rows=unknown,
        ),
        waits=WaitTable(step=step, rank=ranks, wait_s=np.array([row[3] for row in rows])),
        notes=tuple(notes),
    )


def _read_rank(path: Path) -> _Rank:
    """Raises DataError."""
    notes: list[str] = []
    document = _document(path, notes)
    kernels, host, windows = _intervals(document["traceEvents"])
    if not kernels.size and host.size:
        kernels = host
        notes.append(f"{path.name}: no kernel of a device: times are of operators on the host")
    spans = {step: (start, end) for step, (start, end, _) in windows.items()}
    if not spans and kernels.size:
        spans = {0: (float(kernels[:, 0].min()), np.inf)}
        notes.append(f"{path.name}: no profiler step: all of it counts as one")
    own, collectives = (kernels[kernels[:, 2] == kind] for kind in (0.0, 1.0))
    steps = [
        (step, busy_s, _busy_us(collectives, window) * _US)
        for step, window in sorted(spans.items())
        if (busy_s := _busy_us(own, window) * _US) > 0.0
    ]
    if not steps:
        raise DataError(f"{path.name}: no profiler step with kernels in it")
    rank = _rank_of(document, path)
    node = document.get("host_name")
    return _Rank(
        worker=Worker(
            rank=rank,
            stage=_stage_of(document, rank),
            node=node if isinstance(node, str) else "",
        ),
        steps=steps,
        notes=notes,
    )


def _intervals(events: Iterable[Any]) -> tuple[Array, Array, dict[int, tuple[float, float, bool]]]:
    """(start, end, is collective) [kernels, 3] and of operators of the host, in microseconds;
    start and end of each profiler step.
    """
    kernels: list[tuple[float, float, bool]] = []
    host: list[tuple[float, float, bool]] = []
    windows: dict[int, tuple[float, float, bool]] = {}
    for event in events:
        if not isinstance(event, dict):
            continue
        start, length = _number(event.get("ts")), _number(event.get("dur"))
        if start is None or length is None or length < 0.0:
            continue
        name, kind = str(event.get("name", "")), event.get("cat")
        span = (start, start + length, _COLLECTIVE.search(name) is not None)
        if kind == "kernel":
            kernels.append(span)
        elif kind == "cpu_op":
            host.append(span)
        elif (step := _STEP.fullmatch(name)) is not None and (
            # Marks on the device cover one stream; the host's span all that was launched.
            kind == "user_annotation"
            or (kind == "gpu_user_annotation" and int(step[1]) not in windows)
        ):
            windows[int(step[1])] = span
    shape = (-1, 3)
    return np.array(kernels).reshape(shape), np.array(host).reshape(shape), windows


def _number(value: object) -> float | None:
    """A moment or a duration; some writers quote them."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) < MAX_US else None


def _document(path: Path, notes: list[str]) -> dict[str, Any]:
    """The trace; where its file is cut off, the events before that, with a note."""
    try:
        text = text_of(path, notes)
    except DataError as error:
        raise DataError(f"{path.name}: {error.what.partition(': ')[2]}") from None
    try:
        document = json.loads(text)
    except RecursionError:
        raise DataError(f"{path.name}: nested too deeply") from None
    except ValueError as error:
        document = _salvaged(text)
        if document is None:
            raise DataError(f"{path.name}: {error}") from None
        count = len(document["traceEvents"])
        notes.append(f"{path.name}: damaged ({error}): the first {count} events are used")
    if isinstance(document, list):
        document = {"traceEvents": document}
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise DataError(f"{path.name}: no profiler trace: no list of traceEvents")
    if not document["traceEvents"]:
        raise DataError(f"{path.name}: no profiler trace: no event in it")
    return document


def _salvaged(text: str) -> dict[str, Any] | None:
    """What stands before the place where a file is damaged; None: not even one event."""
    decoder = json.JSONDecoder()
    at = text.find(_LIST)
    begin = text.find("[", at) if at >= 0 else -1
    if begin < 0:
        return None
    try:
        document = json.loads(text[:at].rstrip().rstrip(",") + "}")
    except (ValueError, RecursionError):
        document = {}
    events = []
    at = begin + 1
    try:
        while True:
            while text[at : at + 1] in (",", " ", "\n", "\r", "\t"):
                at += 1
            event, at = decoder.raw_decode(text, at)
            events.append(event)
    except (ValueError, RecursionError):
        pass
    return {**document, "traceEvents": events} if events else None


def _rank_of(document: dict[str, Any], path: Path) -> int:
    """From the trace itself, else from the file's name."""
    about = document.get("distributedInfo")
    rank = about.get("rank") if isinstance(about, dict) else None
    if type(rank) is int and 0 <= rank < MAX_RANK:
        return rank
    found = _RANK_IN_NAME.search(path.name)
    return int(found[1]) if found is not None else 0


def _stage_of(document: dict[str, Any], rank: int) -> int:
    """Its place in its pipeline's group, 0 where no group says that it is one."""
    about = document.get("distributedInfo")
    groups = about.get("pg_config") if isinstance(about, dict) else None
    for group in groups if isinstance(groups, list) else []:
        if isinstance(group, dict) and _PIPELINE.search(str(group.get("pg_desc", ""))):
            ranks = group.get("ranks")
            if isinstance(ranks, list) and rank in ranks:
                return ranks.index(rank)
    return 0


def _busy_us(spans: Array, window: Interval) -> float:
    """Length of the union of the intervals that begin inside the window."""
    inside = spans[(spans[:, 0] >= window[0]) & (spans[:, 0] < window[1])]
    if not len(inside):
        return 0.0
    inside = inside[np.argsort(inside[:, 0], kind="stable")]
    start, stop = inside[:, 0], np.maximum.accumulate(inside[:, 1])
    busy = stop - np.maximum(start, np.concatenate([[-np.inf], stop[:-1]]))
    return float(np.maximum(busy, 0.0).sum())
