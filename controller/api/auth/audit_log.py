"""The audit log: allowed and rejected actions, one JSON object per line, append-only.

The file has mode 0600. At its size limit it is renamed to FILE.1, older ones move one number up,
and the oldest is deleted. Beyond a rate, the rejections of one caller, those of all unidentified
callers and the attachments of one agent are counted instead of written: none displaces others.
"""

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pacekeeper.controller.api.auth.peer_identity import host_of
from pacekeeper.controller.api.auth.rate_limit import Limit, RateLimiter
from pacekeeper.controller.api.auth.rbac import Action, Principal, Role
from pacekeeper.core.errors import HostError

REJECTIONS = Limit(per_s=0.1, at_once=100)  # of one caller, written one by one
UNIDENTIFIED = Limit(per_s=1.0, at_once=1000)  # rejections of all unidentified callers
ATTACHES = Limit(per_s=0.1, at_once=1000)  # of one caller; an address, if it is unidentified
MAX_TEXT = 500
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEvent:
    """One allowed or rejected action.

    Attributes:
        action: An `Action`, or another word for it.
        principal: The caller.
        is_allowed: Whether it was allowed.
        peer: Address of the caller.
        about: The object of the action.
        reason: Why it was rejected.
        count: How many such events this entry stands for.
    """

    action: str
    principal: Principal
    is_allowed: bool
    peer: str = ""
    about: str = ""
    reason: str = ""
    count: int = 1


class AuditLog:
    """Writes the log. One per controller: two of them would rotate each other's files."""

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        kept: int,
        on_failure: Callable[[], None],
        on_rejected: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the file.

        Args:
            path: The file.
            max_bytes: Size at which it is rotated.
            kept: Number of rotated files that are kept.
            on_failure: Called for each entry that could not be written.
            on_rejected: Called for each rejected action, also those that are not written.

        Raises:
            HostError: The file cannot be opened.
        """
        self.path = path
        self._max_bytes, self._kept = max_bytes, kept
        self._on_failure, self._on_rejected = on_failure, on_rejected
        self._rejections = RateLimiter(limit=REJECTIONS)
        self._unidentified = RateLimiter(limit=UNIDENTIFIED)
        self._attaches = RateLimiter(limit=ATTACHES)
        self._unwritten = self._unwritten_attaches = 0
        self._error = ""
        self._descriptor = -1
        try:
            self._open()
        except OSError as error:
            raise HostError(
                f"audit log {path}: {error.strerror}", remedy="set another file in [access] audit"
            ) from None

    def note(self, event: AuditEvent) -> bool:
        """Write an event; False if the file cannot be written (logged once, counted always)."""
        if not event.is_allowed:
            self._on_rejected()
            if not self._is_rejection_written(event, time.monotonic()):
                self._unwritten += 1
                return True
        elif event.action == Action.ATTACH and not self._attaches.is_granted(
            event.principal.name, time.monotonic()
        ):
            self._unwritten_attaches += 1
            return True
        try:
            self._write(event)
        except OSError as error:
            self._on_failure()
            if str(error) != self._error:
                self._error = str(error)
                _log.error("The audit log %s cannot be written: %s", self.path, error)
            return False
        self._error = ""
        return True

    def _is_rejection_written(self, event: AuditEvent, now_s: float) -> bool:
        is_unidentified = event.principal.role in (Role.ANONYMOUS, Role.OPEN)
        key = f"unidentified {host_of(event.peer)}" if is_unidentified else event.principal.name
        if not self._rejections.is_granted(key, now_s):
            return False
        return not is_unidentified or self._unidentified.is_granted("", now_s)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, event: AuditEvent) -> None:
        line = _line(event, time.time(), self._unwritten, self._unwritten_attaches)
        if self._descriptor < 0:
            self._open()
        if os.fstat(self._descriptor).st_size + len(line) > self._max_bytes:
            self._rotate()
        # One write per line, so that lines of two writers never mix.
        if os.write(self._descriptor, line) != len(line):
            raise OSError("the disk accepted only a part of the line")
        self._unwritten = self._unwritten_attaches = 0

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o600)

    def _rotate(self) -> None:
        for number in range(self._kept - 1, 0, -1):
            older = self._numbered(number)
            if older.exists():
                older.replace(self._numbered(number + 1))
        self.path.replace(self._numbered(1))
        self.close()
        self._open()

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")


def _line(event: AuditEvent, unix_s: float, unwritten: int, unwritten_attaches: int) -> bytes:
    values: dict[str, object] = {
        "unix_s": round(unix_s, 3),
        "verdict": "allowed" if event.is_allowed else "refused",
        "action": event.action,
        "caller": event.principal.name[:MAX_TEXT],
        "peer": event.peer[:MAX_TEXT],
        "about": event.about[:MAX_TEXT],
        "reason": event.reason[:MAX_TEXT],
    }
    if event.count != 1:
        values["count"] = event.count
    if unwritten:
        values["refusals_not_written_before"] = unwritten
    if unwritten_attaches:
        values["attaches_not_written_before"] = unwritten_attaches
    # ASCII only, so that no name can end a line or move the cursor of a terminal.
    return (json.dumps(values) + "\n").encode("ascii")
