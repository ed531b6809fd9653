"""Reads a log of faults of servers (InfiniteHBD's form) as a history of nodes that come and go.

A JSON list of {node_id, event_time (days), event_type fault_start | fault_end, fault_type {Desc}}.
"""

import json
from collections import Counter
from math import isfinite
from pathlib import Path
from typing import Any

from pacekeeper.core.errors import DataError
from pacekeeper.simulator.cluster.history import (
    Change,
    History,
    NodesJoined,
    NodesLost,
    SpeedChanged,
    in_order,
)
from pacekeeper.simulator.io.text import text_of

DAY_S = 86400.0
# Kinds after which a server still works, slower (the names are the log's own, lower case).
SLOW_KINDS = ("pci link width low", "link speed low", "bandwidth low", "temperature high")


def read_faults(path: Path, *, num_nodes: int, slow_speed: float | None = None) -> History:
    """All `num_nodes` are there from the start; a node is away while any fault of it is open.

    `slow_speed`: what a node computes at under a fail-slow kind (the log tells no size); None:
    such a node is taken out like any other. A fault that ends without a beginning changes nothing,
    and is counted in the notes, as are second beginnings; one that does not end lasts. Raises
    DataError, with the entry, for what is no such log, and for more nodes than `num_nodes`.
    """
    notes: list[str] = []
    try:
        entries = json.loads(text_of(path, notes))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{path}: expected a list of fault events")
    events = sorted(_event(path, at, entry) for at, entry in enumerate(entries))
    number: dict[str, int] = {}
    for _, _, name, _ in events:
        number.setdefault(name, len(number))
    if len(number) > num_nodes:
        raise DataError(f"{path}: names {len(number)} nodes, expected at most {num_nodes}")
    changes: list[Change] = [NodesJoined(at_s=0.0, nodes=tuple(range(num_nodes)))]
    open_kinds: dict[int, Counter[str]] = {}
    unopened = reopened = 0
    for at_s, is_end, name, kind in events:
        node = number[name]
        kinds = open_kinds.setdefault(node, Counter())
        before = _speed(kinds, slow_speed)
        if is_end and not kinds[kind]:
            unopened += 1
            continue
        if not is_end and kinds[kind]:
            reopened += 1
            continue
        kinds[kind] = 0 if is_end else 1
        changes += _changes(at_s, node, before, _speed(kinds, slow_speed))
    for count, what in ((unopened, "end without a beginning"), (reopened, "begin twice")):
        if count:
            notes.append(f"{count} faults that {what} left out")
    try:
        return History(
            name=path.name.partition(".")[0],
            num_nodes=num_nodes,
            duration_s=max(at_s for at_s, *_ in events),
            changes=in_order(changes),
            notes=tuple(notes),
        )
    except ValueError as error:
        raise DataError(f"{path}: no history of nodes: {error}") from None


def is_slow_kind(kind: str) -> bool:
    """Does a server with a fault of this description still work?"""
    return any(words in kind.lower() for words in SLOW_KINDS)


def _speed(kinds: Counter[str], slow_speed: float | None) -> float:
    """What a node with these open faults computes at; 0: it is away."""
    found = [kind for kind, count in kinds.items() if count]
    if not found:
        return 1.0
    if slow_speed is None or not all(is_slow_kind(kind) for kind in found):
        return 0.0
    return slow_speed


def _changes(at_s: float, node: int, before: float, after: float) -> list[Change]:
    if before == after:
        return []
    if after == 0.0:
        return [NodesLost(at_s=at_s, nodes=(node,))]
    changes: list[Change] = [] if before else [NodesJoined(at_s=at_s, nodes=(node,))]
    if before or after != 1.0:
        changes.append(SpeedChanged(at_s=at_s, node=node, speed=after))
    return changes


def _event(path: Path, at: int, entry: Any) -> tuple[float, bool, str, str]:
    """(seconds, is an end, node, kind)"""
    try:
        name, days, what = entry["node_id"], entry["event_time"], entry["event_type"]
        kind = entry["fault_type"]["Desc"]
        is_told = (
            isinstance(name, str)
            and isinstance(kind, str)
            and isinstance(days, int | float)
            and not isinstance(days, bool)
            and isfinite(days)
            and days >= 0.0
            and what in ("fault_start", "fault_end")
        )
    except (TypeError, KeyError, OverflowError):
        is_told = False
    if not is_told:
        raise DataError(
            f"{path}: entry {at}: expected node_id, event_time in days, event_type "
            f"fault_start or fault_end, and fault_type with Desc, got {str(entry)[:80]!r}"
        )
    return days * DAY_S, what == "fault_end", name, kind
