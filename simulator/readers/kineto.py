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
from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.recorded.trace import Chunk, ComputeTable, Trace, WaitTable, Worker
from pacekeeper.simulator.io.text import text_of

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
    """One file: (step, compute, collectives) in seconds; num_ranks: of the job, None: not told."""

    path: Path
    num_ranks: int | None
    worker: Worker
    steps: list[tuple[int, float, float]]
    notes: list[str]


def read_kineto(paths: Sequence[Path]) -> tuple[Trace, ...]:
    """The runs whose ranks wrote these files: files are of one run where no two of them are of one
    rank, they tell the same number of ranks, and they share steps.

    Raises DataError where none of them can be used. Files that can not be read, that hold nothing
    that took time or tell what another tells, are left out and said.
    """
    notes: list[str] = []
    runs: list[list[_Rank]] = []
    for path in paths:
        try:
            one = _read_rank(path)
        except DataError as error:
            notes.append(error.what)
            continue
        if any(_is_copy(one, other) for run in runs for other in run):
            notes.append(f"{path.name}: rank {one.worker.rank} again, left out")
            continue
        run = next((run for run in runs if all(_fits(one, other) for other in run)), None)
        if run is None:
            runs.append([one])
        else:
            run.append(one)
    if not runs:
        raise DataError("; ".join(notes[:4]) or "no file")
    if len(runs) > 1:
        notes.append(
            f"{len(runs)} runs: by rank, number of ranks and steps not all files belong together"
        )
    return tuple(_trace(run, number, len(runs), notes) for number, run in enumerate(runs))


def _is_copy(one: _Rank, other: _Rank) -> bool:
    told, others = ((rank.worker, rank.num_ranks, rank.steps) for rank in (one, other))
    return told == others


def _fits(one: _Rank, other: _Rank) -> bool:
    """May two files be of the same run?"""
    return (
        one.worker.rank != other.worker.rank
        and (None in (one.num_ranks, other.num_ranks) or one.num_ranks == other.num_ranks)
        and bool({step for step, *_ in one.steps} & {step for step, *_ in other.steps})
    )


def _trace(run: Sequence[_Rank], number: int, num_runs: int, notes: Sequence[str]) -> Trace:
    rows = sorted(
        (step, one.worker.rank, compute_s, wait_s)
        for one in run
        for step, compute_s, wait_s in one.steps
    )
    step = np.array([row[0] for row in rows], dtype=np.intp)
    ranks = np.array([row[1] for row in rows], dtype=np.intp)
    whole = np.zeros(len(rows), dtype=np.intp)
    unknown = np.full(len(rows), np.nan)
    name = run[0].path.name.partition(".")[0]
    if len(run) > 1:
        folder = run[0].path.absolute().parent.name
        name = folder if num_runs == 1 else f"{folder}-{number}"
    return Trace(
        name=name,
        source="kineto",
        workers=tuple(sorted((one.worker for one in run), key=lambda worker: worker.rank)),
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
        notes=(*notes, *(note for one in run for note in one.notes)),
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
        path=path,
        num_ranks=_reported_number(document, "world_size"),
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
    rank = _reported_number(document, "rank")
    if rank is not None:
        return rank
    found = _RANK_IN_NAME.search(path.name)
    return int(found[1]) if found is not None else 0


def _reported_number(document: dict[str, Any], name: str) -> int | None:
    about = document.get("distributedInfo")
    value = about.get(name) if isinstance(about, dict) else None
    return value if type(value) is int and 0 <= value < MAX_RANK else None


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
