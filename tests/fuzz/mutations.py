"""Damage to bytes, as files and messages meet it: flipped, cut, doubled, absurd numbers.

Pure but for the generator it is given: the same seed makes the same damage.
"""

import re
from collections.abc import Callable, Sequence
from random import Random

from fuzz import structure

MAX_CASE_BYTES = 1 << 17
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORD = re.compile(rb"[A-Za-z_]{2,}")
NUMBERS = (
    b"0", b"-1", b"1", b"255", b"65536", b"2147483648", b"4294967295", b"9223372036854775807",
    b"18446744073709551616", b"1e308", b"1e999", b"-1e999", b"1e-320", b"NaN", b"Infinity", b"nan",
    b"inf", b"null", b"true", b'""', b"[]", b"{}", b"9" * 400, b"0x7f", b"0.1",
)  # fmt: skip
PATCHES = (
    b"\x00", b"\xff", b"\x80", b"\x7f", b"\x00" * 8, b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\n",
    b"\r\n", b",", b'"', b"\\", b"{", b"}", b"[" * 2000, b'{"a":' * 2000, b"\xc3\x28",
    b"\xff" * 9 + b"\x01", b"\x80" * 9 + b"\x01",
    b"\xef\xbb\xbf", b"\xf0\x9f\x92\xa9", b"\x1f\x8b", b"PAR1", b"=", b"[[", b"'''", b"#",
)  # fmt: skip


def damaged(seeds: Sequence[bytes], random: Random) -> bytes:
    """One of the seeds after one to six kinds of damage, at most MAX_CASE_BYTES long."""
    data = random.choice(seeds)
    inner = structure.inflated(data)
    if inner and random.random() < 0.8:  # else the packing itself is damaged
        return structure.deflated(_damaged(inner, seeds, random))[:MAX_CASE_BYTES]
    return _damaged(data, seeds, random)


def _damaged(data: bytes, seeds: Sequence[bytes], random: Random) -> bytes:
    kinds = _KINDS if random.random() < 0.5 else _MEANT
    for _ in range(random.choice((1, 1, 1, 2, 2, 3, 6))):
        data = random.choice(kinds)(data, seeds, random)[:MAX_CASE_BYTES]
    return data


def _flip(data: bytes, _: Sequence[bytes], random: Random) -> bytes:
    if not data:
        return b"\x00"
    changed = bytearray(data)
    for _times in range(random.choice((1, 1, 2, 8))):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _patch(data: bytes, _: Sequence[bytes], random: Random) -> bytes:
    at, patch = random.randrange(len(data) + 1), random.choice(PATCHES)
    return data[:at] + patch + data[at + (len(patch) if random.random() < 0.5 else 0) :]


def _noise(data: bytes, _: Sequence[bytes], random: Random) -> bytes:
    at, size = random.randrange(len(data) + 1), random.choice((1, 2, 4, 8, 64))
    return data[:at] + random.randbytes(size) + data[at + size :]


def _cut(data: bytes, _: Sequence[bytes], random: Random) -> bytes:
    at = random.randrange(len(data) + 1)
    return data[:at]


def _drop(data: bytes, _: Sequence[bytes], random: Random) -> bytes:
    begin, end = _span(data, random)
    return data[:begin] + data[end:]


def _double(data: bytes, _: Sequence[bytes], random: Random) -> bytes:
    begin, end = _span(data, random)
    return data[:end] + data[begin:end] * random.choice((1, 1, 2, 50)) + data[end:]


def _splice(data: bytes, seeds: Sequence[bytes], random: Random) -> bytes:
    other = random.choice(seeds)
    begin, end = _span(other, random)
    at = random.randrange(len(data) + 1)
    return data[:at] + other[begin:end] + data[at:]


def _number(data: bytes, _: Sequence[bytes], random: Random) -> bytes:
    return _replaced(_NUMBER, data, random.choice(NUMBERS), random)


def _word(data: bytes, seeds: Sequence[bytes], random: Random) -> bytes:
    words = _WORD.findall(random.choice(seeds)) or [b"x"]
    return _replaced(_WORD, data, random.choice(words), random)


def _integer(data: bytes, _: Sequence[bytes], random: Random) -> bytes:
    """A field of a few bytes, as binary files have them, told another number."""
    size = random.choice((1, 2, 4, 8))
    value = random.choice(
        (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, random.getrandbits(64))
    )
    at = random.randrange(len(data) + 1)
    told = (value % (1 << (8 * size))).to_bytes(size, "little")
    return data[:at] + told + data[at + size :]


def _replaced(pattern: re.Pattern[bytes], data: bytes, by: bytes, random: Random) -> bytes:
    found = list(pattern.finditer(data))
    if not found:
        return data + by
    one = random.choice(found)
    return data[: one.start()] + by + data[one.end() :]


def _span(data: bytes, random: Random) -> tuple[int, int]:
    begin = random.randrange(len(data) + 1)
    return begin, min(len(data), begin + random.choice((1, 4, 16, 256, 4096)))


_KINDS: tuple[Callable[[bytes, Sequence[bytes], Random], bytes], ...] = (
    _flip, _patch, _noise, _cut, _drop, _double, _splice, _number, _number, _word, _integer,
)  # fmt: skip
_MEANT = (
    structure.message, structure.document, structure.lines, structure.cells,
    _number, _word,
)  # fmt: skip
