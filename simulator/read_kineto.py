"""Reads PyTorch profiler (Kineto) traces, one file per rank: device time of each profiler step.

A step's compute is the time in which at least one kernel that is no collective runs on the device;
collectives are left out, since waiting for others hides in them.
"""

import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pacekeeper.core.errors import DataError
from pacekeeper.predictor.trace import Chunk, ComputeTable, Trace, WaitTable, Worker

_STEP = re.compile(r"ProfilerStep#(\d+)")
_COLLECTIVE = re.compile(r"nccl|rccl", re.IGNORECASE)
_RANK_IN_NAME = re.compile(r"rank[-_]?(\d+)", re.IGNORECASE)
_US = 1e-6

Interval = tuple[float, float]


def read_kineto(paths: Sequence[Path]) -> Trace:
    """The job whose ranks wrote these files. Raises DataError where none of them can be used.

    Files that can not be read, or that hold no step with device time, are left out and said.
    """
    notes: list[str] = []
    rows: list[tuple[int, int, float, float]] = []
    workers: dict[int, Worker] = {}
    for path in paths:
        try:
            rank, node, steps = _read_rank(path)
        except DataError as error:
            notes.append(error.what)
            continue
        if rank in workers:
            notes.append(f"{path.name}: rank {rank} again, left out")
            continue
        workers[rank] = Worker(rank=rank, node=node)
        rows += [(step, rank, compute_s, wait_s) for step, compute_s, wait_s in steps]
    if not rows:
        raise DataError("; ".join(notes) or "no file")
    rows.sort()
    step = np.array([row[0] for row in rows], dtype=np.intp)
    ranks = np.array([row[1] for row in rows], dtype=np.intp)
    whole = np.zeros(len(rows), dtype=np.intp)
    unknown = np.full(len(rows), np.nan)
    return Trace(
        name=paths[0].parent.name if len(paths) > 1 else paths[0].stem,
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


def _read_rank(path: Path) -> tuple[int, str, list[tuple[int, float, float]]]:
    """(rank, node, [(step, compute, collectives)]) of one file, in seconds. Raises DataError."""
    document = _document(path)
    events = [e for e in document.get("traceEvents") or [] if isinstance(e, dict)]
    kernels: list[Interval] = []
    collectives: list[Interval] = []
    windows: dict[int, Interval] = {}
    for event in events:
        start, length, name = event.get("ts"), event.get("dur"), str(event.get("name", ""))
        if not isinstance(start, int | float) or not isinstance(length, int | float):
            continue
        kind, step = event.get("cat"), _STEP.fullmatch(name)
        if kind == "kernel":
            is_collective = _COLLECTIVE.search(name) is not None
            own = collectives if is_collective else kernels
            own.append((float(start), float(start + length)))
        elif step is not None and (
            # Marks on the device cover one stream; the host's span all that was launched.
            kind == "user_annotation"
            or (kind == "gpu_user_annotation" and int(step[1]) not in windows)
        ):
            windows[int(step[1])] = (float(start), float(start + length))
    steps = [
        (step, busy_s, _busy_us(collectives, window) * _US)
        for step, window in sorted(windows.items())
        if (busy_s := _busy_us(kernels, window) * _US) > 0.0
    ]  # fmt: skip
    if not steps:
        raise DataError(f"{path.name}: no profiler step with kernels in it")
    return _rank_of(document, path), str(document.get("host_name", "")), steps


def _document(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        document = json.loads(data)
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise DataError(f"{path.name}: {str(error) or type(error).__name__}") from None
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise DataError(f"{path.name}: no profiler trace: no list of traceEvents")
    return document


def _rank_of(document: dict[str, Any], path: Path) -> int:
    """From the trace itself, else from the file's name."""
    about = document.get("distributedInfo")
    rank = about.get("rank") if isinstance(about, dict) else None
    if isinstance(rank, int):
        return rank
    found = _RANK_IN_NAME.search(path.name)
    return int(found[1]) if found is not None else 0


def _busy_us(kernels: Sequence[Interval], window: Interval) -> float:
    """Length of the union of the intervals that begin inside the window."""
    inside = sorted(k for k in kernels if window[0] <= k[0] < window[1])
    busy, end = 0.0, -np.inf
    for start, stop in inside:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy
