"""How far the node's wall clock is off, as its kernel knows it (adjtimex, reading only). A shell.

Nothing of ours compares wall clocks between nodes; people and their logs do.
"""

import ctypes
from typing import Any

_NANOSECONDS = 0x2000  # STA_NANO: of the offset, else microseconds
_UNSYNCHRONISED = 0x40  # STA_UNSYNC
_FAILED = -1
_adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None)  # the C library of another kernel has none


class _Timex(ctypes.Structure):
    """struct timex, as far as it is read; the rest is room for what the kernel writes."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 32),
    )


def read() -> dict[str, Any]:
    """Fields of a HostSample; none where the kernel does not tell."""
    told = _Timex()
    if _adjtimex is None or _adjtimex(ctypes.byref(told)) == _FAILED:
        return {}
    return parse(offset=told.offset, max_error_us=told.maxerror, status=told.status)


def parse(*, offset: int, max_error_us: int, status: int) -> dict[str, Any]:
    """`offset`: what is still to be corrected, in the unit that `status` names."""
    return {
        "clock_offset_s": offset * (1e-9 if status & _NANOSECONDS else 1e-6),
        "clock_error_s": max_error_us * 1e-6,
        "is_clock_synchronised": not status & _UNSYNCHRONISED,
    }
