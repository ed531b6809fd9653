"""Offset and error bound of the node's wall clock, read by adjtimex. A shell.

For operators who compare logs of several nodes; pacekeeper never compares wall clocks.
"""

import ctypes
from typing import Any

_NANOSECONDS = 0x2000  # STA_NANO: the offset is in nanoseconds, else in microseconds
_UNSYNCHRONISED = 0x40  # STA_UNSYNC
_FAILED = -1
_adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None)  # absent in C libraries of other kernels


class _Timex(ctypes.Structure):
    """The first fields of struct timex; `rest` is space that the kernel writes."""

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
    """Fields of a HostSample; empty if adjtimex is missing or fails."""
    state = _Timex()
    if _adjtimex is None or _adjtimex(ctypes.byref(state)) == _FAILED:
        return {}
    return parse(offset=state.offset, max_error_us=state.maxerror, status=state.status)


def parse(*, offset: int, max_error_us: int, status: int) -> dict[str, Any]:
    """Convert values of struct timex to fields of a HostSample.

    Args:
        offset: Remaining correction, in the unit given by `status`.
        max_error_us: Error bound in microseconds.
        status: STA_* flags.
    """
    return {
        "clock_offset_s": offset * (1e-9 if status & _NANOSECONDS else 1e-6),
        "clock_error_s": max_error_us * 1e-6,
        "is_clock_synchronised": not status & _UNSYNCHRONISED,
    }
