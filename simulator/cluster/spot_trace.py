"""Reads recorded availability of spot nodes: who comes and goes when, as a history.

Four forms are told apart by the first line: events (`ms,add|remove,name`, Bamboo), one JSON list
per interval (`[ms, "add"|"remove"|"no-op", {"nodes": [..]}]`, Parcae), and counts (`time,number` or
`date, time, number`, Bamboo's clouds).
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import NoReturn

from pacekeeper.core.errors import DataError
from pacekeeper.simulator.cluster.history import Change, History, NodesJoined, NodesLost, in_order
from pacekeeper.simulator.io.text import lines_of

HOUR_S = 3600.0
KINDS = ("add", "remove", "no-op", "migration")  # the last two say nothing of nodes
FORMS = "ms,add|remove,name; [ms, kind, {..}] per line; time,number; or date, time, number"

Said = tuple[float, str, list[str]]  # when (s), "add" or "remove", names
Lines = Sequence[tuple[int, str]]  # numbered


def read_spot(path: Path, *, unit_s: float | None = None) -> History:
    """The history in a file. Raises DataError, with the line, for what is none.

    Of a trace of counts nobody knows which node was lost: the newest goes first. `unit_s`: of its
    times; None: seconds, but hours where any has a fraction, as in Bamboo's files, and milliseconds
    where they are whole seconds of these, up to a million and more, as in Parcae's. It lasts until
    the last line's time (of intervals: until the end of the last).
    """
    notes: list[str] = []
    numbered = enumerate(lines_of(path, notes), 1)
    lines = [(number, line.strip()) for number, line in numbered if line.strip()]
    if not lines:
        raise DataError(f"{path}: empty", remedy=f"expected {FORMS}")
    first = lines[0][1]
    said: Iterable[Said]
    end_s: float | None = None
    if first.startswith("["):
        said, end_s = _intervals(path, lines)
    elif first.count(",") == 2 and not first.partition(",")[0].strip().isdigit():
        said = _of_counts(_dated(path, lines))
    elif first.count(",") == 2:
        said = _events(path, lines)
    elif first.count(",") == 1:
        said = _of_counts(_counts(path, lines, unit_s))
    else:
        _refuse(path, lines[0][0], FORMS, first)
    return _history(path, list(said), end_s, notes)


def _events(path: Path, lines: Lines) -> Iterator[Said]:
    for number, line in lines:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 3 or cells[1] not in ("add", "remove") or not cells[2]:
            _refuse(path, number, "ms,add|remove,name", line)
        yield _number(path, number, cells[0]) / 1e3, cells[1], [cells[2]]


def _intervals(path: Path, lines: Lines) -> tuple[list[Said], float]:
    said: list[Said] = []
    end_s = 0.0
    for number, line in lines:
        try:
            at_ms, kind, more = json.loads(line)
            names, lasts_ms = more["nodes"], more["duration"]
            is_told = kind in KINDS and isinstance(names, list)
        except (ValueError, TypeError, KeyError, RecursionError):
            is_told = False
        if not is_told or not all(isinstance(name, str) for name in names):
            _refuse(path, number, f'[ms, {"|".join(KINDS)}, {{"nodes": [..], ..}}]', line)
        at_s, lasts_s = (_number(path, number, str(x)) / 1e3 for x in (at_ms, lasts_ms))
        end_s = max(end_s, at_s + lasts_s)
        if kind in ("add", "remove"):
            said.append((at_s, kind, names))
    return said, end_s


def _counts(path: Path, lines: Lines, unit_s: float | None) -> list[tuple[float, int]]:
    cells = [line.split(",") for _, line in lines]
    if unit_s is None:
        unit_s = _unit_s([row[0].strip() for row in cells])
    found = []
    for (number, line), row in zip(lines, cells, strict=True):
        if len(row) != 2:
            _refuse(path, number, "time,number", line)
        at_s = _number(path, number, row[0]) * unit_s
        found.append((at_s, _whole(path, number, row[1])))
    return found


def _unit_s(times: Sequence[str]) -> float:
    """Of a trace that does not say it: 1,000,000 s are eleven days, 1,000,000 ms a quarter hour."""
    if any("." in time for time in times):
        return HOUR_S
    is_in_ms = all(time == "0" or time.endswith("000") for time in times)
    return 1e-3 if is_in_ms and len(max(times, key=len)) > 6 else 1.0


def _dated(path: Path, lines: Lines) -> list[tuple[float, int]]:
    found: list[tuple[float, int]] = []
    start: datetime | None = None
    for number, line in lines:
        cells = [cell.strip() for cell in line.split(",")]
        try:
            at = datetime.strptime(f"{cells[0]} {cells[1]}", "%Y-%m-%d %H:%M:%S")
        except (ValueError, IndexError):
            _refuse(path, number, "date, time, number", line)
        if len(cells) != 3:
            _refuse(path, number, "date, time, number", line)
        start = at if start is None else start
        found.append(((at - start).total_seconds(), _whole(path, number, cells[2])))
    return found


def _of_counts(counts: Iterable[tuple[float, int]]) -> Iterator[Said]:
    """The newest node is lost first; every node has a name of its own."""
    there: list[str] = []
    num_named = 0
    for at_s, count in dict(counts).items():  # of one moment the last
        if count > len(there):
            fresh = [f"n{num_named + i}" for i in range(count - len(there))]
            num_named += len(fresh)
            there += fresh
            yield at_s, "add", fresh
        elif count < len(there):
            lost = there[count:]
            del there[count:]
            yield at_s, "remove", lost
        else:
            yield at_s, "add", []


def _history(
    path: Path, said: Sequence[Said], end_s: float | None, notes: Sequence[str]
) -> History:
    """What was said, as numbers of nodes. Raises DataError for what can not have happened."""
    times = [at_s for at_s, _, _ in said]
    if any(earlier > after for earlier, after in pairwise(times)):
        raise DataError(f"{path}: times run backwards", remedy="expected them to ascend")
    number: dict[str, int] = {}
    changes: list[Change] = []
    for (at_s, kind), names in _together(said).items():
        for name in names:
            number.setdefault(name, len(number))
        nodes = tuple(number[name] for name in names)
        if kind == "add":
            changes.append(NodesJoined(at_s=at_s, nodes=nodes))
        else:
            changes.append(NodesLost(at_s=at_s, nodes=nodes))
    try:
        return History(
            name=path.stem,
            num_nodes=len(number),
            duration_s=max(times, default=0.0) if end_s is None else end_s,
            changes=in_order(changes),
            notes=tuple(notes),
        )
    except ValueError as error:
        raise DataError(f"{path}: no history of nodes: {error}") from None


def _together(said: Iterable[Said]) -> dict[tuple[float, str], list[str]]:
    """What is said of one moment and kind, as one; a moment without names changes nothing."""
    found: dict[tuple[float, str], list[str]] = {}
    for at_s, kind, names in said:
        if names:
            found.setdefault((at_s, kind), []).extend(names)
    return found


def _number(path: Path, line: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (isfinite(value) and value >= 0.0):
        _refuse(path, line, "a time from 0 on", text)
    return value


def _whole(path: Path, line: int, text: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) < 7):
        _refuse(path, line, "a number of nodes", text)
    return int(text)


def _refuse(path: Path, line: int, expected: str, got: str) -> NoReturn:
    raise DataError(f"{path}: line {line}: expected {expected}, got {got[:60]!r}")
