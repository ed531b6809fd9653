"""Reads the JSON lines of NCCL's Inspector plugin: every collective of every process.

A collective's transfer time is the shortest of its members': who came last did not wait. The
longer times of the others are waiting, and say who came late.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pacekeeper.core.errors import DataError
from pacekeeper.predictor.recorded.trace import Trace, TransferTable, Worker
from pacekeeper.simulator.io.tables import MAX_S, MAX_WHOLE, left_out
from pacekeeper.simulator.io.text import lines_of

_US = 1e-6
_Member = tuple[str, int]  # node and process


def read_nccl_inspector(paths: Sequence[Path]) -> Trace:
    """The job whose processes wrote these files. Raises DataError where they hold no collective."""
    seen: defaultdict[tuple[str, int], dict[_Member, float]] = defaultdict(dict)
    sizes: dict[tuple[str, int], float] = {}
    widest: dict[_Member, tuple[int, int]] = {}  # (ranks, rank) in its widest communicator
    num_damaged = 0
    notes: list[str] = []
    for path in paths:
        for line in filter(None, map(str.strip, lines_of(path, notes))):
            fact = _fact(line)
            if fact is None:
                num_damaged += 1
                continue
            key, member, rank, num_ranks, num_bytes, spent_s = fact
            seen[key][member] = spent_s
            sizes[key] = num_bytes
            widest[member] = max(widest.get(member, (0, 0)), (num_ranks, rank))
    if not seen:
        raise DataError(f"{', '.join(map(str, paths)) or 'no file'}: no collective in it")
    number = _numbers(widest)
    groups: dict[tuple[int, ...], int] = {}
    rows = []
    for key in sorted(seen):
        ranks = tuple(sorted(number[member] for member in seen[key]))
        group = groups.setdefault(ranks, len(groups))
        rows.append((key[1], group, sizes[key], min(seen[key].values())))
    notes += left_out(num_damaged, "damaged lines left out")
    return Trace(
        name=paths[0].parent.name if len(paths) > 1 else paths[0].name.partition(".")[0],
        source="nccl-inspector",
        workers=tuple(
            Worker(rank=rank, node=node)
            for rank, node in sorted((r, m[0]) for m, r in number.items())
        ),
        transfers=TransferTable(
            step=np.array([row[0] for row in rows], dtype=np.intp),
            group=np.array([row[1] for row in rows], dtype=np.intp),
            num_bytes=np.array([row[2] for row in rows]),
            transfer_s=np.array([row[3] for row in rows]),
        ),
        groups=tuple(groups),
        notes=tuple(notes),
    )


def _numbers(widest: dict[_Member, tuple[int, int]]) -> dict[_Member, int]:
    """The job's own ranks: those of the communicator that holds everybody, else by node and pid."""
    sizes = {num_ranks for num_ranks, _ in widest.values()}
    ranks = {member: rank for member, (_, rank) in widest.items()}
    if len(sizes) == 1 and len(set(ranks.values())) == len(ranks):
        return ranks
    return {member: i for i, member in enumerate(sorted(widest))}


def _fact(line: str) -> tuple[tuple[str, int], _Member, int, int, float, float] | None:
    """((communicator, sequence), member, rank, ranks, bytes, seconds); None: damaged."""
    try:
        document: Any = json.loads(line)
        header, about, spent = document["header"], document["metadata"], document["coll_perf"]
        sequence, rank, num_ranks = (
            int(value) for value in (spent["coll_sn"], header["rank"], header["n_ranks"])
        )
        num_bytes, spent_us = (
            float(spent[name]) for name in ("coll_msg_size_bytes", "coll_exec_time_us")
        )
        whose = (str(header["id"]), sequence), (str(about["hostname"]), int(about["pid"]))
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return None
    is_possible = 0.0 < spent_us * _US < MAX_S and 0.0 <= num_bytes < MAX_WHOLE
    is_possible = is_possible and all(0 <= n < MAX_WHOLE for n in (sequence, rank, num_ranks))
    return (*whose, rank, num_ranks, num_bytes, spent_us * _US) if is_possible else None
