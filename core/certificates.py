"""Until when a certificate counts, read from its file's text with the standard library alone. Pure.

Agents have no X.509 library, and need none for this: the end of validity is the second time in the
first certificate (RFC 5280, 4.1).
"""

import base64
import binascii
import re
from calendar import timegm

_FIRST = re.compile("-----BEGIN CERTIFICATE-----(.{1,65536}?)-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _CONTEXT_0, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18
_MOMENT = re.compile(r"(\d{2}|\d{4})(\d{2})(\d{2})(\d{2})(\d{2})(\d{2})Z", re.ASCII)
_WRONG = "no certificate in PEM form"


def ends_unix_s(text: str) -> float:
    """Of the first certificate of a PEM file. Raises ValueError where there is none."""
    found = _FIRST.search(text)
    if found is None:
        raise ValueError(_WRONG)
    try:
        der = base64.b64decode("".join(found[1].split()), validate=True)
    except binascii.Error as error:
        raise ValueError(f"{_WRONG}: {error}") from None
    signed, *_ = _inside(der, _SEQUENCE) or [b""]
    fields = _inside(signed, _SEQUENCE)
    if fields and fields[0][:1] == bytes([_CONTEXT_0]):
        fields = fields[1:]  # the version
    if len(fields) < 4:  # number, algorithm, issuer, validity
        raise ValueError(f"{_WRONG}: it ends too soon")
    times = _inside(fields[3], _SEQUENCE)
    if len(times) != 2:
        raise ValueError(f"{_WRONG}: its validity is no pair of times")
    return _moment(times[1])


def _inside(der: bytes, tag: int) -> list[bytes]:
    """The parts of a constructed value, each with its own tag and length."""
    if der[:1] != bytes([tag]):
        raise ValueError(f"{_WRONG}: tag {der[:1].hex() or 'missing'}, expected {tag:x}")
    first, end = _value(der)
    parts = []
    while first < end:
        _, after = _value(der[first:end])
        parts.append(der[first : first + after])
        first += after
    return parts


def _value(der: bytes) -> tuple[int, int]:
    """Where the value of the first part begins and ends."""
    if len(der) < 2:
        raise ValueError(f"{_WRONG}: it ends too soon")
    length, first = der[1], 2
    if length & 0x80:
        count = length & 0x7F
        first += count
        length = int.from_bytes(der[2:first], "big")
        if not 1 <= count <= 4:
            raise ValueError(f"{_WRONG}: a length of {count} bytes")
    if first + length > len(der):
        raise ValueError(f"{_WRONG}: it ends too soon")
    return first, first + length


def _moment(der: bytes) -> float:
    first, end = _value(der)
    text = der[first:end].decode("ascii", "replace")
    found = _MOMENT.fullmatch(text)
    digits = {_UTC_TIME: 2, _GENERALIZED_TIME: 4}.get(der[0])
    if found is None or len(found[1]) != digits:
        raise ValueError(f"{_WRONG}: {text!r:.40} is no time of it")
    year, *others = map(int, found.groups())
    if der[0] == _UTC_TIME:
        year += 1900 if year >= 50 else 2000
    try:
        return float(timegm((year, *others)))
    except ValueError as error:
        raise ValueError(f"{_WRONG}: {text!r:.40}: {error}") from None
