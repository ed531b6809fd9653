"""The audit log: who did what, or was kept from it; one JSON object per line, only ever appended.

Readable by its owner only. At its size the file is set aside as FILE.1 (the older ones one number
up), the oldest goes. Refusals of one caller beyond a few are counted, not written, so are those of
strangers beyond some, from however many addresses, and an agent that comes again and again: none of
these must be able to push the rest out.
"""

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pacekeeper.controller.api.auth.rate_limit import Limit, RateLimiter
from pacekeeper.controller.api.auth.rbac import OPEN_AT, Action, Role
from pacekeeper.core.errors import HostError

REFUSALS = Limit(per_s=0.1, at_once=100)  # of one caller that are written one by one
STRANGERS = Limit(per_s=1.0, at_once=1000)  # refusals of all together of whom nothing is known
ATTACHES = Limit(per_s=0.1, at_once=1000)  # of one caller; an open controller knows addresses only
MAX_TEXT = 500
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEvent:
    """One thing that was done or refused. `about`: what it was done to."""

    action: str
    caller: str
    is_allowed: bool
    peer: str = ""
    about: str = ""
    reason: str = ""
    count: int = 1


class AuditLog:
    """The writer. One per controller: two of them would rotate each other's files."""

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        kept: int,
        on_failure: Callable[[], None],
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        """Raises HostError where the file can not be opened: nothing is done unseen."""
        self.path = path
        self._max_bytes, self._kept = max_bytes, kept
        self._on_failure, self._on_refused = on_failure, on_refused
        self._refusals = RateLimiter(limit=REFUSALS)
        self._strangers = RateLimiter(limit=STRANGERS)
        self._attaches = RateLimiter(limit=ATTACHES)
        self._unwritten = self._unwritten_attaches = 0
        self._trouble = ""
        self._descriptor = -1
        try:
            self._open()
        except OSError as error:
            raise HostError(
                f"audit log {path}: {error.strerror}", remedy="name another in [access] audit"
            ) from None

    def note(self, deed: AuditEvent) -> bool:
        """Write it down; False where the file takes nothing (said once, counted each time)."""
        if not deed.is_allowed:
            self._on_refused()
            if not self._is_worth_a_line(deed, time.monotonic()):
                self._unwritten += 1
                return True
        elif deed.action == Action.ATTACH and not self._attaches.is_granted(
            deed.caller, time.monotonic()
        ):
            self._unwritten_attaches += 1
            return True
        try:
            self._write(deed)
        except OSError as error:
            self._on_failure()
            if str(error) != self._trouble:
                self._trouble = str(error)
                _log.error("audit=%s can not be written: %s", self.path, error)
            return False
        self._trouble = ""
        return True

    def _is_worth_a_line(self, refused: AuditEvent, now_s: float) -> bool:
        is_stranger = refused.caller == Role.NOBODY or refused.caller.startswith(OPEN_AT)
        who = f"nobody at {host_of(refused.peer)}" if is_stranger else refused.caller
        if not self._refusals.is_granted(who, now_s):
            return False
        return not is_stranger or self._strangers.is_granted("", now_s)

    def close(self) -> None:
        """Nothing more will come."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, deed: AuditEvent) -> None:
        line = _line(deed, time.time(), self._unwritten, self._unwritten_attaches)
        if self._descriptor < 0:
            self._open()
        if os.fstat(self._descriptor).st_size + len(line) > self._max_bytes:
            self._set_aside()
        # One write, one line: never half of it before another's.
        if os.write(self._descriptor, line) != len(line):
            raise OSError("the disk took half a line")
        self._unwritten = self._unwritten_attaches = 0

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o600)

    def _set_aside(self) -> None:
        for number in range(self._kept - 1, 0, -1):
            older = self._numbered(number)
            if older.exists():
                older.replace(self._numbered(number + 1))
        self.path.replace(self._numbered(1))
        self.close()
        self._open()

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")


def host_of(peer: str) -> str:
    """The host in gRPC's name of a peer: ipv4:192.0.2.1:5000 -> ipv4:192.0.2.1."""
    return peer.rpartition(":")[0] or peer


def _line(deed: AuditEvent, unix_s: float, unwritten: int, unwritten_attaches: int) -> bytes:
    values: dict[str, object] = {
        "unix_s": round(unix_s, 3),
        "verdict": "allowed" if deed.is_allowed else "refused",
        "action": deed.action,
        "caller": deed.caller[:MAX_TEXT],
        "peer": deed.peer[:MAX_TEXT],
        "about": deed.about[:MAX_TEXT],
        "reason": deed.reason[:MAX_TEXT],
    }
    if deed.count != 1:
        values["count"] = deed.count
    if unwritten:
        values["refusals_not_written_before"] = unwritten
    if unwritten_attaches:
        values["attaches_not_written_before"] = unwritten_attaches
    # ASCII, so that no name can end a line or move a terminal's cursor.
    return (json.dumps(values) + "\n").encode("ascii")
