"""Renews a controller's lease in a separate thread, so that neither computing nor a disk delays it.

`lease.py` decides; this module reads the clock, which also counts while the host is suspended, and
calls the lease's store. A leader whose event loop shows no sign of life resigns: its thread alone
would renew for ever. Others take over first, as after each resignation.
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from pacekeeper.controller.ha import lease
from pacekeeper.controller.ha.lease import ElectionMember, Read, Record, Wait, Write
from pacekeeper.core.text import format_s

RELEASE_WITHIN_S = 2.0
HUNG_DURATIONS = 5.0  # of the lease: for how long a leader may show no sign of life
_log = logging.getLogger(__name__)


class AwayError(Exception):
    """The record's store did not answer: a write may be applied already or later."""


class LeaseStore(Protocol):
    """Compares and swaps one record. Both calls raise AwayError if the outcome is unknown."""

    def read(self) -> Record | None: ...

    def write(self, record: Record, expected: Record | None) -> bool: ...

    def close(self) -> None: ...


def clock_s() -> float:
    """Seconds that also pass while this host is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseRenewer:
    """One member and its thread. Its methods may be called from anywhere."""

    def __init__(
        self,
        member: ElectionMember,
        store: LeaseStore,
        clock_s: Callable[[], float] = clock_s,
    ) -> None:
        self._member, self._store, self._clock_s = member, store, clock_s
        self._news = threading.Condition()
        self._is_over = False
        self._is_writing = False
        self._outage = ""
        self._alive_s = clock_s()
        self._resigned_term = 0
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def term(self) -> int | None:
        """The term to command in now; None: no command may be sent."""
        with self._news:
            return lease.active_term(self._member, self._clock_s()) or None

    def show_alive(self) -> None:
        """Show that the leader's event loop runs; called several times in a lease's duration."""
        self._alive_s = self._clock_s()

    @property
    def record(self) -> Record | None:
        """The record as it was read last."""
        with self._news:
            return None if self._member.seen is None else self._member.seen.record

    def set_eligible(self, after_s: float = 0.0) -> None:
        """Allow it to take over after `after_s`."""
        self._change(lambda member: lease.set_eligible(member, self._clock_s() + after_s))

    def resign(self, term: int, why: str) -> None:
        """Release the lease, if it leads in this term; take over nothing until eligible again."""
        with self._news:
            if self._resigned_term == term:
                return
            self._resigned_term = term
            _log.error("The leader of term %d resigns: %s", term, why)
            self._set_member(lease.resign(self._member))

    def has_resigned(self, term: int) -> bool:
        """Whether it has resigned in this term."""
        with self._news:
            return self._resigned_term == term

    def observe_term(self, term: int) -> bool:
        """Process a term that an agent reports; returns whether it is accepted."""
        self._change(lambda member: lease.observe_term(member, term, self._clock_s()))
        with self._news:
            return self._member.reported >= term

    def close(self) -> None:
        """Release the lease if its store answers in time, and end the thread."""
        self._change(lease.leave)
        give_up_s = self._clock_s() + RELEASE_WITHIN_S
        with self._news:
            # A write in flight may make this member the leader: then that lease is released, too.
            while self._holds_something() and (left_s := give_up_s - self._clock_s()) > 0.0:
                self._news.wait(left_s)
            self._is_over = True
            self._news.notify_all()
        if self._thread.is_alive():
            self._thread.join(RELEASE_WITHIN_S)

    def _holds_something(self) -> bool:
        return bool(self._member.term) or self._is_writing

    def _change(self, change: Callable[[ElectionMember], ElectionMember]) -> None:
        with self._news:
            self._set_member(change(self._member))

    def _set_member(self, member: ElectionMember) -> None:
        """Called with the lock."""
        before, self._member = self._member, member
        if member.term != before.term:
            self._alive_s = self._clock_s()
            what = f"leads in term {member.term}" if member.term else f"left term {before.term}"
            _log.info("lease: %s %s", member.name, what)
        self._news.notify_all()

    def _run(self) -> None:
        while True:
            with self._news:
                self._is_writing = False
                if self._is_over:
                    break
                now_s = self._clock_s()
                self._set_member(lease.time_passes(self._member, now_s))
                hung_s = now_s - self._alive_s
                limit_s = HUNG_DURATIONS * self._member.timing.duration_s
                if (term := lease.active_term(self._member, now_s)) and hung_s > limit_s:
                    self.resign(term, f"its event loop has hung for {format_s(hung_s)}")
                step = lease.next_step(self._member, now_s)
                self._is_writing = isinstance(step, Write)
                if isinstance(step, Wait):
                    self._news.wait(max(0.0, step.until_s - now_s))
                    continue
            try:
                self._do(step)
            except AwayError as error:
                self._log_outage(str(error))
                self._change(partial(lease.is_unknown, step=step, now_s=self._clock_s()))
            except Exception as error:  # our bug: without this thread it would never lead again
                text = f"{type(error).__name__}: {error}"
                if text != self._outage:
                    _log.exception("The lease's store failed")
                self._log_outage(text)
                self._change(partial(lease.is_unknown, step=step, now_s=self._clock_s()))

        self._store.close()

    def _do(self, step: Read | Write) -> None:
        if isinstance(step, Read):
            record = self._store.read()
            self._change(lambda m: lease.has_read(m, record, self._clock_s()))
        elif self._store.write(step.record, step.expected):
            self._change(lambda m: lease.has_written(m, step, self._clock_s()))
        else:
            self._change(lambda m: lease.was_refused(m, self._clock_s()))
        self._log_outage("")

    def _log_outage(self, why: str) -> None:
        """Log a change of the reason why there is no answer."""
        if why and why != self._outage:
            _log.warning("lease: no answer: %s", why)
        elif self._outage and not why:
            _log.info("lease: its store answers again")
        self._outage = why
