"""The bytes of one rank's ring file: header, command slot, record slots.

    0     header          magic, version, slot size and count, pid, JSON attachment
    4032  sign of life    phase of the rank and since when, signal of its stack dumps
    4096  command slot    plan generation + checksum, probe, term, suspect ranks, bitmap of dead
                          ranks, agent heartbeat
    8192  record slots    SLOT_COUNT slots of SLOT_BYTES, oldest overwritten first

Record slot: sequence (u64, index + 1, written last; 0 while it is being written), Adler-32 over
sequence and payload, then the payload. A reader accepts a slot only if the sequence is the expected
one before and after the copy and the checksum matches; torn and corrupt slots are counted and
skipped.
"""

import json
import re
import struct
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from pacekeeper.core.errors import VersionError
from pacekeeper.core.layout.pipeline_schedule import parse_schedule
from pacekeeper.core.telemetry.attachment import Attachment, Clock, ModelShape
from pacekeeper.core.telemetry.record_codec import unpack
from pacekeeper.core.telemetry.records import PAYLOAD_BYTES, Record
from pacekeeper.core.telemetry.sign_of_life import SIGN

DEFAULT_RING_DIR = "/dev/shm/pacekeeper"  # of agents and ranks that are given no other
MAGIC = b"PACERING"
VERSION = 11
SLOT_BYTES = 128
SLOT_COUNT = 1024
SIGN_OFFSET = 4032  # its own cache line; zeros in rings of ranks from before it
COMMAND_OFFSET = 4096
SLOTS_OFFSET = 8192
FILE_BYTES = SLOTS_OFFSET + SLOT_BYTES * SLOT_COUNT
MAX_RANKS = 16384  # ranks of one job the death bitmap has room for
MAX_SUSPECTS = 64  # the lowest ranks, where there are more

T = TypeVar("T")
_HEADER = struct.Struct("<8sHHIII")  # magic, version, slot bytes, slot count, pid, JSON length
_SLOT = struct.Struct(f"<QI{PAYLOAD_BYTES}s")  # sequence, checksum, payload
SLOT_REST = struct.Struct(f"<I{PAYLOAD_BYTES}s")  # all but the sequence
_COMMAND = struct.Struct(f"<QI4xQQQQQ32s{2 * MAX_SUSPECTS}s{MAX_RANKS // 8}s")
_SUSPECTS = struct.Struct(f"<{MAX_SUSPECTS}H")
_NO_RANK = 0xFFFF
HEARTBEAT = struct.Struct("<d")
HEARTBEAT_OFFSET = COMMAND_OFFSET + _COMMAND.size
COMMAND_BYTES = _COMMAND.size
SEQUENCE = struct.Struct("<Q")
_RUN_ID_NAME = "life"  # of the run ID in a ring's header
_JOB_FILE = re.compile(r"\.?(?:.+\.ring|.+\.stack|(?:plan|layout)-.+\.json)(?:\..+)?")
_PLAN_NAME = re.compile(r"plan-([0-9]{6,9})\.json")
_LAYOUT_NAME = re.compile(r"layout-([0-9]{1,15})-([0-9]{1,9})\.json")

assert _SLOT.size == SLOT_BYTES
assert SIGN_OFFSET + SIGN.size <= COMMAND_OFFSET
assert HEARTBEAT_OFFSET + HEARTBEAT.size <= SLOTS_OFFSET


class TornError(ValueError):
    """A slot was being written while it was read: read it again later."""


class CorruptError(ValueError):
    """A slot does not match its checksum or holds no record; the reader counts it and continues."""


def encode_header(attachment: Attachment) -> bytes:
    """The header of a new ring. Raises ValueError if the attachment is too large."""
    values = asdict(attachment)
    values[_RUN_ID_NAME] = values.pop("run_id")
    if not attachment.plan_kinds:
        del values["plan_kinds"]
    if attachment.model is not None:  # no defaults: agents from before a field read it, too
        values["model"] = {
            field.name: values["model"][field.name]
            for field in fields(ModelShape)
            if getattr(attachment.model, field.name) != field.default
        }
    text = json.dumps(values, sort_keys=True).encode()
    if _HEADER.size + len(text) > SIGN_OFFSET:
        raise ValueError("the attachment does not fit the ring's header")
    head = _HEADER.pack(MAGIC, VERSION, SLOT_BYTES, SLOT_COUNT, attachment.pid, len(text))
    return head + text


def decode_header(header: bytes) -> Attachment:
    """Parse the attachment in a ring's header.

    Raises:
        VersionError: the ring has another version.
        ValueError: the file is not a ring.
    """
    if len(header) < _HEADER.size:
        raise ValueError("too short for a ring")
    magic, version, slot_bytes, slot_count, _, length = _HEADER.unpack_from(header)
    if magic != MAGIC:
        raise ValueError("not a pacekeeper ring: wrong magic")
    if (version, slot_bytes, slot_count) != (VERSION, SLOT_BYTES, SLOT_COUNT):
        raise VersionError(
            f"ring version {version} ({slot_count} slots of {slot_bytes} bytes), this side reads "
            f"version {VERSION} ({SLOT_COUNT} of {SLOT_BYTES})",
            remedy="install the same pacekeeper in the trainer's and the agent's environment",
        )
    try:
        values = json.loads(header[_HEADER.size : _HEADER.size + length])
        model = values.pop("model")
        values["run_id"] = values.pop(_RUN_ID_NAME, 0)
        if model is not None and model.get("schedule") is not None:
            model["schedule"] = parse_schedule(model["schedule"])
        shape = None if model is None else _checked(ModelShape, model)
        return _checked(Attachment, {**values, "clock": Clock(values["clock"]), "model": shape})
    except (TypeError, KeyError, AttributeError, RecursionError, ValueError) as error:
        raise ValueError(f"the ring's header is corrupt: {error}") from None


def _checked(kind: type[T], values: dict[str, Any]) -> T:
    """An instance of `kind` from JSON values, each of the type that its field declares."""
    for field in fields(kind):  # type: ignore[arg-type]
        value = values.get(field.name)
        is_given = field.type in (int, str, bool) and field.name in values
        if is_given and type(value) is not field.type:
            raise TypeError(f"{field.name} is {value!r}")
    return kind(**values)


def slot_offset(index: int) -> int:
    """The file offset of record number `index` (from 0, never wrapping)."""
    return SLOTS_OFFSET + (index % SLOT_COUNT) * SLOT_BYTES


def slot_checksum(sequence: bytes, payload: bytes) -> int:
    """The checksum of a slot whose first eight bytes are `sequence`.

    Adler-32, not CRC: the CRC tables are cold in every micro-batch, half of a record's cost at p99.
    """
    return zlib.adler32(payload, zlib.adler32(sequence))


def decode_slot(index: int, before: int, slot: bytes, after: int) -> Record | None:
    """Record number `index` from a copied slot.

    Args:
        index: the number of the record, from 0.
        before: the sequence read before the copy.
        slot: the copied bytes.
        after: the sequence read after the copy.

    Returns:
        The record; None if it is not written yet.

    Raises:
        TornError: the writer changed the slot during the copy.
        CorruptError: the content does not match its checksum or is not a record.
        LookupError: the writer has lapped the reader. The checksum must match here, too, so that a
            damaged sequence cannot move the reader forward.
    """
    expected = index + 1
    if before != after:
        raise TornError(f"slot of record {index} is being written")
    if before < expected:
        return None
    if len(slot) < _SLOT.size:
        raise CorruptError(f"record {index} is cut off")
    sequence, checksum, payload = _SLOT.unpack_from(slot)
    if sequence != before or checksum != slot_checksum(slot[: SEQUENCE.size], payload):
        raise CorruptError(f"record {index} does not fit its checksum")
    if before > expected:
        raise LookupError(f"record {index} is overwritten by record {before - 1}")
    try:
        return unpack(payload)
    except ValueError as error:
        raise CorruptError(f"record {index}: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSlot:
    """Commands from the node's agent to one rank.

    Attributes:
        plan_generation: 0: no plan. The plan is the file `plan_file_name(generation)` in the
            directory of the ring.
        plan_sha256: the digest of that file.
        run_id: the run of the job that the commands are for; 0: any.
        probe: the number of the newest requested probe, ascending; 0: none.
        suspect_ranks: ranks on nodes with an open finding, the lowest MAX_SUSPECTS at most.
        term: of the controller that sent the commands; commands of earlier terms are ignored.
    """

    plan_generation: int = 0
    base_generation: int = 0
    plan_sha256: bytes = bytes(32)
    dead_ranks: frozenset[int] = frozenset()
    run_id: int = 0
    probe: int = 0
    suspect_ranks: frozenset[int] = frozenset()
    term: int = 0


def encode_command(sequence: int, command: CommandSlot) -> bytes:
    """The bytes of the command slot; `sequence` grows with every write and is stored last."""
    bitmap = _to_bitmap(command.dead_ranks)
    plan = (command.plan_generation, command.base_generation)
    numbers = (*plan, command.run_id, command.probe, command.term)
    parts = (command.plan_sha256, _to_list(command.suspect_ranks), bitmap)
    return _COMMAND.pack(sequence, _command_crc(sequence, numbers, *parts), *numbers, *parts)


def decode_command(area: bytes) -> tuple[int, CommandSlot]:
    """Parse the command slot.

    Returns:
        (sequence, command); (0, empty command) before the agent's first write.

    Raises:
        TornError: the checksum does not match: read again at the next step.
        ValueError: the area is too short.
    """
    if len(area) < _COMMAND.size:
        raise ValueError(f"a command slot has {_COMMAND.size} bytes, got {len(area)}")
    sequence, crc, *numbers, digest, suspects, bitmap = _COMMAND.unpack_from(area)
    plan, base, run_id, probe, term = numbers
    if sequence == 0:
        return 0, CommandSlot()
    if crc != _command_crc(sequence, numbers, digest, suspects, bitmap):
        raise TornError("the command slot is being written")
    command = CommandSlot(
        plan_generation=plan,
        base_generation=base,
        plan_sha256=digest,
        dead_ranks=frozenset(_from_bitmap(bitmap)),
        run_id=run_id,
        probe=probe,
        suspect_ranks=frozenset(_SUSPECTS.unpack(suspects)) - {_NO_RANK},
        term=term,
    )
    return sequence, command


def _command_crc(sequence: int, numbers: Iterable[int], *parts: bytes) -> int:
    return zlib.crc32(struct.pack("<QQQQQQ", sequence, *numbers) + b"".join(parts))


def _to_list(ranks: Iterable[int]) -> bytes:
    lowest = sorted(ranks)[:MAX_SUSPECTS]
    if not all(0 <= rank < MAX_RANKS for rank in lowest):
        raise ValueError(f"suspects {lowest} are beyond the {MAX_RANKS} ranks of a job")
    return _SUSPECTS.pack(*lowest, *[_NO_RANK] * (MAX_SUSPECTS - len(lowest)))


def _to_bitmap(ranks: Iterable[int]) -> bytes:
    bits = bytearray(MAX_RANKS // 8)
    for rank in ranks:
        if not 0 <= rank < MAX_RANKS:
            raise ValueError(f"rank {rank} is beyond the {MAX_RANKS} ranks of a job")
        bits[rank // 8] |= 1 << (rank % 8)
    return bytes(bits)


def _from_bitmap(bitmap: bytes) -> Iterable[int]:
    for byte_index, byte in enumerate(bitmap):
        if byte:
            for bit in range(8):
                if byte >> bit & 1:
                    yield byte_index * 8 + bit


def ring_file_name(rank: int) -> str:
    """The file name of a rank's ring, in the job's directory below the node's ring directory."""
    return f"rank-{rank:05d}.ring"


SUPERVISOR_RING = "supervisor.ring"


def stack_file_name(ring_name: str) -> str:
    """The file beside a ring into which its process dumps its stacks."""
    return ring_name.removesuffix(".ring") + ".stack"


def plan_file_name(generation: int) -> str:
    """The file name of a plan; it is written under another name and renamed to this one when
    complete.
    """
    return f"plan-{generation:06d}.json"


def parse_plan_file_name(name: str) -> int | None:
    """The generation of a plan's file, or None for any other name."""
    found = _PLAN_NAME.fullmatch(name)
    return None if found is None else int(found[1])


def layout_file_name(generation: int, run_id: int = 0) -> str:
    """The file name of a layout of this run of the job."""
    return f"layout-{run_id}-{generation:06d}.json"


def parse_layout_file_name(name: str) -> tuple[int, int] | None:
    """(generation, run ID) of a layout's file, or None for any other name."""
    found = _LAYOUT_NAME.fullmatch(name)
    return None if found is None else (int(found[2]), int(found[1]))


def is_job_file_name(name: str) -> bool:
    """Whether a file belongs to one run of a job: rings, stacks, plans, layouts, unfinished
    copies.
    """
    return _JOB_FILE.fullmatch(name) is not None
