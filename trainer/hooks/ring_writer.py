"""One rank's ring: a file on tmpfs that the rank writes and the node's agent reads.

Never blocks, never raises into training, makes no system call for a record, needs no agent alive.
Anything that goes wrong is counted; after MAX_ERRORS the ring disarms itself for good: it writes no
more, and still hears what the agent says.
"""

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import sys
import time
import weakref
from pathlib import Path
from zlib import adler32

from pacekeeper.core.errors import HostError, PacekeeperError
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.record_codec import pack
from pacekeeper.core.telemetry.records import Record
from pacekeeper.core.telemetry.shm_ring import (
    COMMAND_BYTES,
    COMMAND_OFFSET,
    SLOT_BYTES,
    SLOT_COUNT,
    SLOT_REST,
    SLOTS_OFFSET,
)

_OPENED = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


_AGENT_LOOKS_S = 0.01  # more than the agent holds the lock for, when it looks who lives


def writer_of(path: Path) -> int:
    """The pid in the header of a ring that somebody still writes; 0 where nobody does."""
    with contextlib.suppress(OSError, ValueError, PacekeeperError):
        descriptor = os.open(path, _OPENED)
        try:
            if _is_locked(descriptor):
                time.sleep(_AGENT_LOOKS_S)
                if _is_locked(descriptor):
                    pid = shm_ring.decode_header(os.pread(descriptor, shm_ring.SLOTS_OFFSET, 0)).pid
                    os.kill(pid, 0)  # OSError where it has ended: a child of its has the lock
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
_put_rest = SLOT_REST.pack_into
_rings: "weakref.WeakSet[Ring]" = weakref.WeakSet()  # of this process
_log = logging.getLogger(__name__)


def claim_directory(directory: Path, job: str) -> int:
    """Make the job's directory on this node ours and clear it of what earlier lives left there.

    Returns the open directory that holds the claim until it is closed, -1 where there is no such
    directory to be had (training goes on unwatched). Raises HostError where another launch of this
    job holds it: two would overwrite each other's rings.
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
    except OSError:  # a file system without locks: nothing is cleared that may be in use
        os.close(claim)
        return -1
    for name in os.listdir(path):
        if shm_ring.is_job_file_name(name):
            with contextlib.suppress(OSError):
                (path / name).unlink()
    return claim


class Ring:
    """The writer's side of one ring file. `is_armed` is False where nothing is written (any more).

    Use from one thread. A forked child inherits the mapping but must not write it: it disarms.
    """

    def __init__(
        self, path: Path | None, memory: mmap.mmap | None, *, life: int = 0, reason: str = ""
    ) -> None:
        self.path = path
        self.life = life
        self.reason = reason
        self.num_errors = 0
        self.num_plans_missing = 0  # looked for, and no such file
        self.num_plans_wrong = 0  # the file does not fit its digest
        self._misfit: tuple[object, ...] = ()  # a plan's file that did not: hashed once
        self._complained: tuple[int, bytes] | None = None  # of this plan
        self._memory = memory  # None: closed, or a parent's
        self._slots = memory  # where records go; None: disarmed
        self._index = 0
        self._heard = _BEING_WRITTEN  # sequence of the command that was taken in
        self._command = shm_ring.CommandSlot()
        self._term = 0  # the highest of any command
        self._is_inherited = False  # by a forked child, which has not tried to write
        _rings.add(self)

    @classmethod
    def create(
        cls, directory: Path, attachment: Attachment, *, file_name: str | None = None
    ) -> "Ring":
        """The ring of `attachment.rank` below `directory`/job; disarmed, with one warning, if not.

        The file appears whole (renamed into place), so an agent never reads half a header.
        """
        path = directory / attachment.job / (file_name or shm_ring.ring_file_name(attachment.rank))
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with fresh.open("w+b") as file:
                # Every byte now: a store into a page that a full tmpfs can not give is a SIGBUS,
                # and that ends the training process. This way it is an OSError here.
                whole = shm_ring.encode_header(attachment).ljust(shm_ring.FILE_BYTES, b"\0")
                file.write(whole)
                file.flush()
                memory = mmap.mmap(file.fileno(), shm_ring.FILE_BYTES)
                memory[:] = whole  # touched once: no record pays for a page's first use
                # Held by the mapping's own descriptor: the kernel lets go when this process ends,
                # and that is how the agent knows, whatever the name space of pids.
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_SH)
            writer = writer_of(path)
            if writer == os.getpid() and not any(r.path == path and r.is_armed for r in _rings):
                writer = 0  # detached; a child that was forked meanwhile keeps the lock
            fresh.rename(path)
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError, ValueError):
                fresh.unlink(missing_ok=True)
            _log.warning(
                "rank=%d not watched: no ring at %s: %s; training goes on without pacekeeper. "
                "ring_dir= or PACEKEEPER_RING_DIR must name the agent's --ring-dir, where this "
                "user may make files",
                attachment.rank,
                path,
                error,
            )
            return cls(None, None, reason=str(error))
        if writer:
            _log.warning(
                "rank=%d of job %s: %s; from now on only this attachment is heard",
                attachment.rank,
                attachment.job,
                "attached before in this process, and not detached"
                if writer == os.getpid()
                else f"process {writer} on this node attached as the same rank and is alive: "
                "see rank= and world_size=, or give this job another name",
            )
        return cls(path, memory, life=attachment.life)

    @property
    def is_armed(self) -> bool:
        return self._slots is not None

    def write(self, record: Record) -> None:
        """Put one record into the next slot, over the oldest one."""
        try:
            self.write_payload(pack(record))
        except Exception as error:  # training is never stopped by us
            self.count_error(error)

    def write_payload(self, payload: bytes) -> None:
        """The same for a record that is packed already. Few calls: after a wait each is cold."""
        slots = self._slots
        if slots is None:
            if self._is_inherited:
                self._say_inherited()
            return
        try:
            index = self._index
            if index == SLOT_COUNT:
                self._say_unread()
            sequence = (index + 1).to_bytes(8, "little")
            offset = SLOTS_OFFSET + index % SLOT_COUNT * SLOT_BYTES
            # Sequence 0 while the rest changes, the true one last: a reader sees a torn slot. As
            # slices: eight bytes in one store, where a struct of fixed byte order takes eight.
            slots[offset : offset + 8] = _BEING_WRITTEN
            told = adler32(payload, adler32(sequence))  # as slot_checksum, without one more frame
            _put_rest(slots, offset + 8, told, payload)
            slots[offset : offset + 8] = sequence
            self._index = index + 1
        except Exception as error:  # training is never stopped by us
            self.count_error(error)

    def command(self) -> shm_ring.CommandSlot:
        """What the agent last said; cheap while nothing changed, the old value while torn.

        What was meant for another life of the job is nothing to us, nor what was said in an
        earlier term than was heard already.
        """
        memory = self._memory
        if memory is None:
            return self._command
        try:
            sequence = memory[COMMAND_OFFSET:_COMMAND_REST]
            if sequence != self._heard:
                self._hear(memory, sequence)
        except shm_ring.TornError:
            pass  # the agent is writing: the next look sees it
        except Exception as error:
            self.count_error(error)
        return self._command

    def _hear(self, memory: mmap.mmap, sequence: bytes) -> None:
        """Take the command in that stands there now. Raises TornError while it is written."""
        if sequence == _BEING_WRITTEN:
            # Or its writer died in the middle: its next life counts anew, so that whatever number
            # comes next is news.
            self._heard = sequence
            return
        number, said = shm_ring.decode_command(
            memory[COMMAND_OFFSET : COMMAND_OFFSET + COMMAND_BYTES]
        )
        if number != 0:  # 0: the next write began between the look and the copy
            self._heard = number.to_bytes(8, "little")
            if said.term < self._term:
                return  # a later controller has spoken
            self._term = said.term
            is_ours = said.life == self.life or not (said.life and self.life)
            self._command = said if is_ours else shm_ring.CommandSlot()

    def heartbeat_mono_s(self) -> float:
        """When the agent last looked (this node's monotonic clock); 0.0 for never."""
        if self._memory is None:
            return 0.0
        beat: float = shm_ring.HEARTBEAT.unpack_from(self._memory, shm_ring.HEARTBEAT_OFFSET)[0]
        return beat

    def read_plan(self, generation: int, sha256: bytes) -> bytes | None:
        """The plan's bytes if its file is there and fits the digest, else None (look again).

        A file that did not fit is read again only when it has changed. Each such plan is one
        warning.
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
            self._complain(generation, sha256, str(error))
            return None
        if hashlib.sha256(data).digest() != sha256:
            self.num_plans_wrong += 1
            self._misfit = looked_at
            self._complain(generation, sha256, f"{path} does not fit its digest")
            return None
        return data

    def _complain(self, generation: int, sha256: bytes, trouble: str) -> None:
        if self._complained != (generation, sha256):
            self._complained = (generation, sha256)
            _log.warning("plan=%d is offered and can not be read: %s", generation, trouble)

    def write_layout(self, generation: int, layout_json: bytes) -> None:
        """Tell the node's agent which layout runs: a file beside the ring, whole or not at all."""
        if self.path is None:
            return
        target = self.path.with_name(shm_ring.layout_file_name(generation, self.life))
        fresh = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            fresh.write_bytes(layout_json)
            fresh.rename(target)
        except OSError as error:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            self.count_error(error)

    def close(self) -> None:
        """Stop writing. The file stays for the agent to read to its end."""
        if self._memory is not None:
            if 0 < self._index <= SLOT_COUNT:  # else it is said already
                self._say_unread()
            self._memory.close()
        self._memory = self._slots = None

    def let_go(self) -> None:
        """In a forked child, say: the ring is its parent's."""
        self._is_inherited = self._slots is not None
        self._memory = self._slots = None
        self.reason = "a forked child does not write its parent's ring"

    def _say_inherited(self) -> None:
        self._is_inherited = False
        _log.warning(
            "ring=%s is of the process that this one was forked from: nothing of this one is told; "
            "attach after the fork, in the process that trains",
            self.path,
        )

    def _say_unread(self) -> None:
        if self.heartbeat_mono_s() == 0.0:
            _log.warning(
                "ring=%s no agent has read any of %d records: does `pacekeeper agent` run on this "
                "node, with this --ring-dir?",
                self.path,
                self._index,
            )

    def count_error(self, error: Exception) -> None:
        """Something of ours went wrong: say so once, stop writing when it keeps going wrong."""
        self.num_errors += 1
        if self.num_errors == 1:
            _log.warning(
                "ring=%s lost a record, told at %s: %s: %s",
                self.path,
                _caller(),
                type(error).__name__,
                error,
            )
        elif self.num_errors == MAX_ERRORS:
            self._slots = None
            self.reason = f"disarmed after {MAX_ERRORS} errors: {error}"
            _log.warning("ring=%s %s; training goes on unwatched", self.path, self.reason)


def _caller() -> str:
    """Where ours was called: the innermost line that is not of these folders."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _let_go_of_all() -> None:
    for inherited in _rings:
        inherited.let_go()


os.register_at_fork(after_in_child=_let_go_of_all)
