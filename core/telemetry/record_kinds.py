"""The kinds of records and how their payloads are laid out: what every reader must agree on."""

import struct
from enum import IntEnum

PAYLOAD_BYTES = 116  # kind, two bytes that are zero, fields, zeros to the end


class RecordKind(IntEnum):
    """Numbers on disk: never reuse one."""

    MICRO_BATCH = 1
    STEP = 2
    EXPERT_LOAD = 3
    PLAN_APPLIED = 4
    RANK_EXIT = 5
    PROBE = 6
    PLAN_REFUSED = 7
    CHECKPOINT = 8
    SNAPSHOT = 9


def payload_of(kind: RecordKind, fields: str) -> tuple[struct.Struct, int]:
    """A whole payload with these fields, and its kind as the plain number that `struct` takes."""
    used = struct.Struct(f"<H2x{fields}").size
    return struct.Struct(f"<H2x{fields}{PAYLOAD_BYTES - used}x"), int(kind)
