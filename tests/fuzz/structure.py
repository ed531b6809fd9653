"""Damage to what bytes mean: one field of a protobuf message, one value of a JSON document.

Lengths around it are made to fit again, so that the damage arrives where it is meant to. Pure but
for the generator it is given.
"""

import gzip
import json
import zlib
from collections.abc import Sequence
from random import Random
from typing import Any

INTEGERS = (
    0, 1, 2, 127, 128, 1023, 1024, 16383, 16384, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1,
)  # fmt: skip
REALS = (
    bytes(8), b"\0\0\0\0\0\0\xf0\x7f", b"\0\0\0\0\0\0\xf0\xff", b"\0\0\0\0\0\0\xf8\x7f",
    b"\1\0\0\0\0\0\0\0", b"\xff" * 7 + b"\x7f", b"\xff\xff\xff\xff\xff\xff\xef\x7f",
    b"\0\0\0\0\0\0\xf0\xbf",
)  # fmt: skip
TEXTS = (
    b"", b"\0", b"a/b", b"..", b"../../x", b"-", b"\xc3\x28", b"\xf0\x9f\x92\xa9", b"\x1b[2J\n",
    b"x" * 300, b"x" * 70_000, b"%s%n", b"'\"`;", b"1e999", b"\xe2\x80\xae", b"{}", b"[[]]",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, 1.5, 1e308, float("inf"),
    float("-inf"), float("nan"), 5e-324, "", "x", "\0", "../x", "\ud800", [], {}, [[]], [{}],
    [None], {"a": 1}, "9" * 5000,
)  # fmt: skip
MOST_INFLATED = 1 << 20
MAX_DEPTH = 12
MAX_FIELDS = 4000
_Field = list[Any]  # number, wire type, value: int, bytes, or a list of fields


def message(data: bytes, seeds: Sequence[bytes], random: Random) -> bytes:
    """One field of a protobuf message, however deep, changed. The same bytes where it is none.

    A first byte that is no part of it, as in what says which method is called, stays.
    """
    for head in (0, 1):
        fields = _fields(data[head:], 0)
        if fields:
            _change(fields, seeds, random, head)
            return data[:head] + _packed(fields)
    return data


def document(data: bytes, seeds: Sequence[bytes], random: Random) -> bytes:
    """One value of a JSON document changed: of all of it, of a line, or behind a length."""
    if len(data) > 8 and data[8:9] == b"{":  # a length before it, as in a file of tensors
        size = int.from_bytes(data[:8], "little")
        told = _document(data[8 : 8 + size], random)
        if told is not None:
            return len(told).to_bytes(8, "little") + told + data[8 + size :]
    if (told := _document(data, random)) is not None:
        return told
    lines = data.split(b"\n")
    at = random.randrange(len(lines))
    if (told := _document(lines[at], random)) is not None:
        lines[at] = told
    return b"\n".join(lines)


def lines(data: bytes, seeds: Sequence[bytes], random: Random) -> bytes:
    """One line dropped, doubled, moved, or taken from another input."""
    own = data.split(b"\n")
    at, to = random.randrange(len(own)), random.randrange(len(own))
    match random.randrange(4):
        case 0:
            del own[at]
        case 1:
            own.insert(at, own[to])
        case 2:
            own[at], own[to] = own[to], own[at]
        case _:
            own.insert(at, random.choice(random.choice(seeds).split(b"\n")))
    return b"\n".join(own)


def cells(data: bytes, seeds: Sequence[bytes], random: Random) -> bytes:
    """One cell of a table of text left out, or another's."""
    rows = data.split(b"\n")
    at = random.randrange(len(rows))
    row = rows[at].split(b",")
    column = random.randrange(len(row))
    other = random.choice(rows).split(b",")
    row[column] = random.choice((b"", row[column][:-1], other[column % len(other)]))
    rows[at] = b",".join(row)
    return b"\n".join(rows)


def inflated(data: bytes) -> bytes:
    """What is behind gzip, if it is; else empty."""
    if data[:2] != b"\x1f\x8b":
        return b""
    try:
        return zlib.decompressobj(31).decompress(data, MOST_INFLATED)
    except zlib.error:
        return b""


def deflated(data: bytes) -> bytes:
    """The way back."""
    return gzip.compress(data, 1, mtime=0)


def _fields(data: bytes, depth: int) -> list[_Field] | None:
    """The fields of a message; None where the bytes are none."""
    found: list[_Field] = []
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if at < 0 or not 0 < number < 1000 or len(found) > MAX_FIELDS:
            return None
        value: Any
        if kind == 0:
            value, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value, at = data[at : at + size], at + size
        elif kind == 2:
            size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
            if at <= len(data) and size and depth < MAX_DEPTH:
                value = _fields(value, depth + 1) or value
        else:
            return None
        if not 0 < at <= len(data):
            return None
        found.append([number, kind, value])
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(number, where it ends); ends at -1 - far outside - where there is none."""
    value = 0
    for place in range(10):
        if not 0 <= at + place < len(data):
            break
        byte = data[at + place]
        value |= (byte & 127) << (7 * place)
        if byte < 128:
            return value & (2**64 - 1), at + place + 1
    return 0, -(1 << 40)


def _packed(fields: list[_Field]) -> bytes:
    parts = []
    for number, kind, value in fields:
        parts.append(_told(number << 3 | kind))
        if kind == 0:
            parts.append(_told(value))
            continue
        data = _packed(value) if isinstance(value, list) else value
        parts += [_told(len(data)), data] if kind == 2 else [data]
    return b"".join(parts)


def _told(value: int) -> bytes:
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])


def _change(fields: list[_Field], seeds: Sequence[bytes], random: Random, head: int) -> None:
    """Walk down to some field and change it there."""
    while True:
        at = random.randrange(len(fields))
        number, kind, value = fields[at]
        if isinstance(value, list) and random.random() < 0.8:
            fields = value
            continue
        break
    match random.randrange(8):
        case 0:
            del fields[at]
        case 1:
            copies = random.choice((1, 1, 3, 60))
            fields[at:at] = [fields[at]] * copies
        case 2:
            fields.append(fields.pop(at))
        case 3:
            fields[at] = [max(1, number + random.choice((-1, 1, 2))), kind, value]
        case 4:
            other = _fields(random.choice(seeds)[head:], 0)
            while other:
                taken = random.choice(other)
                if not isinstance(taken[2], list) or random.random() < 0.4:
                    fields[at] = [number if random.random() < 0.5 else taken[0], *taken[1:]]
                    break
                other = taken[2]
        case _:
            fields[at] = [number, kind, _changed(kind, value, random)]


def _changed(kind: int, value: Any, random: Random) -> Any:
    if kind == 0:
        near = (value + random.choice((-1, 1))) % 2**64
        return random.choice((*INTEGERS, near, random.getrandbits(random.choice((8, 16, 64)))))
    if kind == 1:
        return random.choice(REALS)
    if kind == 5:
        return random.choice(REALS)[4:]
    if isinstance(value, list):
        return []
    changed = bytearray(value)
    if changed and random.random() < 0.5:
        changed[random.randrange(len(changed))] = random.getrandbits(8)
        return bytes(changed)
    return random.choice(TEXTS)


def _document(data: bytes, random: Random) -> bytes | None:
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(whole, dict | list) or not whole:
        return None
    places: list[tuple[Any, Any]] = []
    _walk(whole, places, 0)
    holder, key = random.choice(places)
    is_number = isinstance(holder[key], int | float) and abs(holder[key]) < 1e300
    match random.randrange(6):
        case 0:
            del holder[key]
        case 1:
            held, other = random.choice(places)
            holder[key] = _copied(held[other]) if other in _keys(held) else None
        case 2:
            _add(holder, key, random)
        case 3 if is_number:
            holder[key] = random.choice((-1, 2, 0.5, 1e300, 2**62)) * (holder[key] or 1)
        case _:
            holder[key] = random.choice(VALUES)
    try:
        return json.dumps(whole).encode()
    except (ValueError, RecursionError, OverflowError):
        return None


def _walk(value: Any, places: list[tuple[Any, Any]], depth: int) -> None:
    if depth > 100 or len(places) > MAX_FIELDS:
        return
    for key in _keys(value):
        places.append((value, key))
        _walk(value[key], places, depth + 1)


def _keys(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value)
    return range(len(value)) if isinstance(value, list) else ()


def _copied(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _add(holder: Any, key: Any, random: Random) -> None:
    if isinstance(holder, list):
        holder[key:key] = [_copied(holder[key])] * random.choice((1, 1, 3, 60))
    else:
        holder[random.choice(("", "x", f"{key}x", "rank", "0"))] = _copied(holder[key])
