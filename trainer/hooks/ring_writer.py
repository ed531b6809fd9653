"""Writer of one rank's ring: a memory-mapped file on tmpfs that the node's agent reads.

Writing a record never blocks, never raises and makes no system call, with or without an agent.
Errors are counted; after MAX_ERRORS the ring disarms itself: it writes no more records but still
reads commands.
"""

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import struct
import sys
import threading
import time
import weakref
from pathlib import Path
from time import monotonic_ns
from zlib import adler32

from pacekeeper.core.errors import HostError, PacekeeperError
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.record_codec import pack
from pacekeeper.core.telemetry.records import Record
from pacekeeper.core.telemetry.shm_ring import (
    COMMAND_BYTES,
    COMMAND_OFFSET,
    SIGN_OFFSET,
    SLOT_BYTES,
    SLOT_COUNT,
    SLOT_REST,
    SLOTS_OFFSET,
)
from pacekeeper.core.telemetry.sign_of_life import ENDED, PHASE_BITS, UNKNOWN

_OPENED = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


_AGENT_CHECK_S = 0.01  # longer than the agent holds the lock while it checks for a live writer


def active_writer_pid(path: Path) -> int:
    """Return the pid of the live process that writes the ring at `path`, 0 if there is none."""
    with contextlib.suppress(OSError, ValueError, PacekeeperError):
        descriptor = os.open(path, _OPENED)
        try:
            if _is_locked(descriptor):
                time.sleep(_AGENT_CHECK_S)
                if _is_locked(descriptor):
                    pid = shm_ring.decode_header(os.pread(descriptor, shm_ring.SLOTS_OFFSET, 0)).pid
                    os.kill(pid, 0)  # OSError if it has ended and a child holds the lock
                    return pid
        finally:
            os.close(descriptor)
    return 0


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


MAX_ERRORS = 3
_OURS = ("pacekeeper.trainer.", "torch.")
_BEING_WRITTEN = bytes(8)
_COMMAND_REST = COMMAND_OFFSET + len(_BEING_WRITTEN)
_PHASE_END = SIGN_OFFSET + 8
_put_rest = SLOT_REST.pack_into
rings: "weakref.WeakSet[Ring]" = weakref.WeakSet()  # of this process
_log = logging.getLogger(__name__)


def claim_directory(directory: Path, job: str) -> int:
    """Lock the job's directory on this node for this launch and delete files of earlier launches.

    Returns:
        A file descriptor that holds the lock until it is closed; -1 if the directory cannot be
        created or locked (training continues unmonitored).

    Raises:
        HostError: If another launch of the job holds it: both would overwrite each other's rings.
    """
    path = directory / job
    try:
        path.mkdir(parents=True, exist_ok=True)
        claim = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(claim)
        raise HostError(
            f"ring directory {directory}: another launch of job {job!r} on this node uses it",
            remedy="stop that launch, or give this one another --ring-dir or job name",
        ) from None
    except OSError:  # a file system without locks: delete nothing, it may be in use
        os.close(claim)
        return -1
    for name in os.listdir(path):
        if shm_ring.is_job_file_name(name):
            with contextlib.suppress(OSError):
                (path / name).unlink()
    return claim


class Ring:
    """The writing side of one ring file; `is_armed` is False if records are not written.

    Use it from one thread. A forked child must not write its parent's ring: there it is disarmed.
    """

    def __init__(
        self, path: Path | None, memory: mmap.mmap | None, *, run_id: int = 0, reason: str = ""
    ) -> None:
        self.path = path
        self.run_id = run_id
        self.reason = reason
        self.num_errors = 0
        self.num_plans_missing = 0  # reads of a plan without a file
        self.num_plans_wrong = 0  # reads of a plan whose file has another digest
        self._misfit: tuple[object, ...] = ()  # that file, so that it is hashed once
        self._warned_plan: tuple[int, bytes] | None = None  # the plan of the last warning
        self._memory = memory  # None: closed, or a parent's
        self._slots = memory  # destination of records; None: disarmed
        self._phase = UNKNOWN
        self._index = 0
        self._command_sequence = _BEING_WRITTEN  # of the command read last
        self._command = shm_ring.CommandSlot()
        self._term = 0  # the highest of any command
        self._is_inherited = False  # in a forked child that has not tried to write yet
        self._thread = threading.get_ident()
        rings.add(self)

    @classmethod
    def create(
        cls, directory: Path, attachment: Attachment, *, file_name: str | None = None
    ) -> "Ring":
        """Create the ring of `attachment.rank` in `directory`/job.

        The file is renamed into place, so an agent never reads half a header.

        Returns:
            The ring; a disarmed one, with one warning, if the file cannot be created.
        """
        path = directory / attachment.job / (file_name or shm_ring.ring_file_name(attachment.rank))
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with fresh.open("w+b") as file:
                # Write every byte now: storing into a page that a full tmpfs cannot provide is a
                # SIGBUS, which would end the training process. Here it is an OSError.
                whole = shm_ring.encode_header(attachment).ljust(shm_ring.FILE_BYTES, b"\0")
                file.write(whole)
                file.flush()
                memory = mmap.mmap(file.fileno(), shm_ring.FILE_BYTES)
                memory[:] = whole  # touch every page once, before the first record
                # The mapping's own descriptor holds the lock until this process ends: so the agent
                # detects its end in any pid namespace.
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_SH)
            writer = active_writer_pid(path)
            if writer == os.getpid() and not any(r.path == path and r.is_armed for r in rings):
                writer = 0  # detached; a child forked meanwhile keeps the lock
            fresh.rename(path)
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError, ValueError):
                fresh.unlink(missing_ok=True)
            _log.warning(
                "rank=%d is not monitored: cannot create a ring at %s: %s. Training continues "
                "without pacekeeper. Set ring_dir= or PACEKEEPER_RING_DIR to the agent's "
                "--ring-dir and allow this user to create files there",
                attachment.rank,
                path,
                error,
            )
            return cls(None, None, reason=str(error))
        if writer:
            _log.warning(
                "rank=%d of job %s: %s; from now on only this attachment is read",
                attachment.rank,
                attachment.job,
                "this process attached it before and did not detach"
                if writer == os.getpid()
                else f"process {writer} on this node attached as the same rank and is alive: "
                "check rank= and world_size=, or give this job another name",
            )
        return cls(path, memory, run_id=attachment.run_id)

    @property
    def is_armed(self) -> bool:
        return self._slots is not None

    def write(self, record: Record) -> None:
        """Write a record into the next slot, over the oldest one."""
        try:
            self.write_payload(pack(record))
        except Exception as error:  # never raise into training
            self.count_error(error)

    def write_payload(self, payload: bytes) -> None:
        """Write a packed record. Makes few calls: after a wait each one is cold in the cache."""
        slots = self._slots
        if slots is None:
            if self._is_inherited:
                self._warn_inherited()
            return
        try:
            index = self._index
            if index == SLOT_COUNT:
                self._warn_unread()
            sequence = (index + 1).to_bytes(8, "little")
            offset = SLOTS_OFFSET + index % SLOT_COUNT * SLOT_BYTES
            # Sequence 0 while the rest changes, the real one last: a reader detects a torn slot.
            # A slice is one store of eight bytes; a struct of fixed byte order makes eight stores.
            slots[offset : offset + 8] = _BEING_WRITTEN
            checksum = adler32(payload, adler32(sequence))  # shm_ring.slot_checksum, inlined
            _put_rest(slots, offset + 8, checksum, payload)
            slots[offset : offset + 8] = sequence
            self._index = index + 1
        except Exception as error:  # never raise into training
            self.count_error(error)

    def enter_phase(self, phase: int) -> int:
        """Publish what this rank does from now on (`core.telemetry.sign_of_life`).

        One store of eight bytes. Returns the phase before, to come back to it.
        """
        before, self._phase = self._phase, phase
        memory = self._memory
        if memory is not None:
            sign = monotonic_ns() << PHASE_BITS | phase
            memory[SIGN_OFFSET:_PHASE_END] = sign.to_bytes(8, "little")
        return before

    def publish_dump_signal(self, number: int) -> None:
        """Publish the signal on which this process dumps its stacks beside the ring."""
        if self._memory is not None:
            self._memory[_PHASE_END : _PHASE_END + 4] = number.to_bytes(4, "little")

    def command(self) -> shm_ring.CommandSlot:
        """Return the agent's newest command; the previous one while a new one is being written.

        Commands for another launch of the job, or of an earlier controller term, are ignored. Cheap
        while nothing changed.
        """
        memory = self._memory
        if memory is None:
            return self._command
        try:
            sequence = memory[COMMAND_OFFSET:_COMMAND_REST]
            if sequence != self._command_sequence:
                self._read_command(memory, sequence)
        except shm_ring.TornError:
            pass  # the agent is writing: the next call reads it
        except Exception as error:
            self.count_error(error)
        return self._command

    def _read_command(self, memory: mmap.mmap, sequence: bytes) -> None:
        """Read the current command. Raises TornError while it is being written."""
        if sequence == _BEING_WRITTEN:
            # Being written, or its writer died in between. A restarted agent counts from the start,
            # so any number that follows is new.
            self._command_sequence = sequence
            return
        number, command = shm_ring.decode_command(
            memory[COMMAND_OFFSET : COMMAND_OFFSET + COMMAND_BYTES]
        )
        if number != 0:  # 0: the next write began before the copy was complete
            self._command_sequence = number.to_bytes(8, "little")
            if command.term < self._term:
                return  # from a deposed controller
            self._term = command.term
            is_ours = command.run_id == self.run_id or not (command.run_id and self.run_id)
            self._command = command if is_ours else shm_ring.CommandSlot()

    def heartbeat_mono_s(self) -> float:
        """Return when the agent last read this ring (monotonic clock of the node), 0.0: never."""
        if self._memory is None:
            return 0.0
        beat: float = shm_ring.HEARTBEAT.unpack_from(self._memory, shm_ring.HEARTBEAT_OFFSET)[0]
        return beat

    def read_plan(self, generation: int, sha256: bytes) -> bytes | None:
        """Return the plan's bytes if its file exists and has the digest, else None (try again).

        A file with another digest is read again only after it changed. Each such plan is logged
        once.
        """
        if self.path is None:
            return None
        path = self.path.with_name(shm_ring.plan_file_name(generation))
        try:
            status = path.stat()
            looked_at = (
                *(generation, sha256, status.st_ino, status.st_size),
                *(status.st_mtime_ns, status.st_ctime_ns),
            )
            if looked_at == self._misfit:
                return None
            data = path.read_bytes()
        except OSError as error:
            self.num_plans_missing += 1
            self._warn_plan(generation, sha256, str(error))
            return None
        if hashlib.sha256(data).digest() != sha256:
            self.num_plans_wrong += 1
            self._misfit = looked_at
            self._warn_plan(generation, sha256, f"{path} does not have the digest of the offer")
            return None
        return data

    def _warn_plan(self, generation: int, sha256: bytes, trouble: str) -> None:
        if self._warned_plan != (generation, sha256):
            self._warned_plan = (generation, sha256)
            _log.warning("plan=%d is offered but cannot be read: %s", generation, trouble)

    def write_layout(self, generation: int, layout_json: bytes) -> None:
        """Write the current layout for the agent, atomically, to a file beside the ring."""
        if self.path is None:
            return
        target = self.path.with_name(shm_ring.layout_file_name(generation, self.run_id))
        fresh = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            fresh.write_bytes(layout_json)
            fresh.rename(target)
        except OSError as error:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            self.count_error(error)

    def close(self) -> None:
        """Stop writing. The file stays until the agent has read it."""
        if self._memory is not None:
            if 0 < self._index <= SLOT_COUNT:  # else it was logged before
                self._warn_unread()
            self.enter_phase(ENDED)
            self._memory.close()
        self._memory = self._slots = None

    def disown(self) -> None:
        """Disarm the ring in a forked child: it belongs to the parent."""
        self._is_inherited = self._slots is not None
        self._memory = self._slots = None
        self.reason = "a forked child does not write its parent's ring"

    def _warn_inherited(self) -> None:
        self._is_inherited = False
        _log.warning(
            "ring=%s belongs to the parent process: records of this forked child are dropped; "
            "attach after the fork, in the process that trains",
            self.path,
        )

    def _warn_unread(self) -> None:
        if self.heartbeat_mono_s() == 0.0:
            _log.warning(
                "ring=%s: no agent has read any of %d records; check that `pacekeeper agent` runs "
                "on this node with this --ring-dir",
                self.path,
                self._index,
            )

    def count_error(self, error: Exception) -> None:
        """Count an error: log the first one, disarm the ring at MAX_ERRORS."""
        self.num_errors += 1
        if self.num_errors == 1:
            why, where = self._explain(error), _caller()
            _log.warning("ring=%s lost a record, reported at %s: %s", self.path, where, why)
        elif self.num_errors == MAX_ERRORS:
            self._slots = None
            self.reason = f"disarmed after {MAX_ERRORS} errors: {self._explain(error)}"
            _log.warning("ring=%s %s; training continues unmonitored", self.path, self.reason)

    def _explain(self, error: Exception) -> str:
        """Return what failed, and what the caller can do where it is the caller's call."""
        what = f"{type(error).__name__}: {error}"
        if isinstance(error, struct.error):  # of a record: nothing else is packed here
            return (
                f"a reported value is negative, too large or of another type ({what}); pass counts "
                "as integers from 0 on, and times and losses as numbers"
            )
        if threading.get_ident() != self._thread:
            name = threading.current_thread().name
            what += f"; reported by thread {name!r}, attached by another: use one thread for both"
        return what


def _caller() -> str:
    """Return the innermost caller outside of pacekeeper and torch, as file:line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _disown_all() -> None:
    for inherited in rings:
        inherited.disown()


os.register_at_fork(after_in_child=_disown_all)
