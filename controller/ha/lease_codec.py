"""The lease's record as JSON: what etcd and Kubernetes keep of it. Pure."""

import json
from dataclasses import asdict, fields
from typing import Any

from pacekeeper.controller.ha.lease import HIGHEST_TERM, Record

MOST_BYTES = 16384
_KINDS: dict[str, type] = {f.name: f.type for f in fields(Record)}  # type: ignore[misc]


def encode_record(record: Record) -> str:
    """One line, keys in order."""
    return json.dumps(asdict(record), sort_keys=True)


def decode_record(text: str) -> Record:
    """Raises ValueError for what is no record of ours."""
    if len(text) > MOST_BYTES:
        raise ValueError(f"{len(text)} characters are no record of a lease")
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(found, dict) or found.keys() != _KINDS.keys():
        raise ValueError("not a record of a lease")
    copies = found.pop("copies")
    if not isinstance(copies, list) or not all(isinstance(copy, str) for copy in copies):
        raise ValueError("copies: expected names")
    for name, value in found.items():
        expected = (int, float) if _KINDS[name] is float else (_KINDS[name],)
        if isinstance(value, bool) or not isinstance(value, expected):
            raise ValueError(f"{name}: {value!r}")
        if isinstance(value, int | float) and not 0 <= value <= HIGHEST_TERM:
            raise ValueError(f"{name}: {value!r}")
    return Record(copies=tuple(copies), **found)
