"""Faults injected on request: orders in files, obeyed once per step and written down as truth."""

import contextlib
import json
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

COMPUTE_FAULT, LINK_FAULT = "compute", "link"
_SPIN_S = 0.0005
_log = logging.getLogger(__name__)


class Slowable(Protocol):
    """What a fault acts on: 1.0 is healthy."""

    slowdown: float


@dataclass(slots=True, kw_only=True)
class Burner:
    """Real extra compute for the CPU clock: (slowdown - 1) times a segment's own CPU time."""

    slowdown: float = 1.0

    def __call__(self, spent_s: float) -> None:
        if self.slowdown <= 1.0:
            return
        until_s = time.thread_time() + (self.slowdown - 1.0) * spent_s
        while time.thread_time() < until_s:
            sum(range(100))


@dataclass(slots=True, kw_only=True)
class FaultInjector:
    """Obeys `directory`/rank-R.json and writes down what it did, with the step, in truth.jsonl.

    `{"slowdown": 1.6, "kind": "compute"}` (1.0 lifts the fault); kinds not named are healthy.
    Looked at once per step, only re-read when it changed. A wrong order is refused with one
    warning; training goes on. `targets`: what a fault of each kind acts on.
    """

    directory: Path
    rank: int
    targets: Mapping[str, Slowable]
    _stamp: tuple[int, int, int] = (0, 0, 0)

    def begin_step(self, step: int) -> None:
        """Set the target's slowdown to what the file says now."""
        path = self.directory / f"rank-{self.rank}.json"
        try:
            status = path.stat()
            # Size and inode too: the clock behind a file's time moves in ticks of milliseconds.
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp == self._stamp:
                return
            order = json.loads(path.read_text())
        except (OSError, ValueError):
            return  # none, or in the middle of being written: look again at the next step
        self._stamp = stamp
        try:
            slowdown, kind = _read_order(order, self.targets)
            # The truth first: a fault that is not written down would accuse the detector.
            self._tell(slowdown, kind, step)
        except (OSError, ValueError) as error:
            _log.warning("rank=%d fault order %s refused: %s", self.rank, path, error)
            return
        for name, target in self.targets.items():
            target.slowdown = slowdown if name == kind else 1.0

    def _tell(self, slowdown: float, kind: str, step: int) -> None:
        line = {
            "rank": self.rank,
            "kind": kind,
            "slowdown": slowdown,
            "step": step,
            "mono_s": time.monotonic(),
        }
        with (self.directory / "truth.jsonl").open("a") as truth:
            truth.write(json.dumps(line) + "\n")


def _read_order(order: object, kinds: Collection[str]) -> tuple[float, str]:
    """(slowdown, kind) ordered. Raises ValueError for what is no order to a rank."""
    if not isinstance(order, dict):
        raise ValueError(f"expected an object with 'slowdown', got {order!r}")
    slowdown, kind = order.get("slowdown"), order.get("kind", COMPUTE_FAULT)
    if isinstance(slowdown, bool) or not isinstance(slowdown, int | float):
        raise ValueError(f"slowdown: expected a number, got {slowdown!r}")
    if not (math.isfinite(slowdown) and slowdown > 0.0):
        raise ValueError(f"slowdown: expected a finite number above 0, got {slowdown}")
    if kind not in kinds:
        raise ValueError(
            f"kind: expected one of {sorted(kinds)} (others act from outside), got {kind!r}"
        )
    return float(slowdown), str(kind)


def stop_duty_cycle(pid: int, *, duty: float, period_s: float, is_over: Callable[[], bool]) -> None:
    """Stop the process `pid` for `duty` of each period (SIGSTOP, SIGCONT); always ends running.

    `is_over` is asked once a period. Raises ValueError for a duty outside (0, 1); ends early where
    the process is gone.
    """
    if not 0.0 < duty < 1.0:
        raise ValueError(f"duty: expected between 0 and 1, got {duty}")
    with contextlib.suppress(ProcessLookupError):
        try:
            while not is_over():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(period_s * duty)
                os.kill(pid, signal.SIGCONT)
                time.sleep(period_s * (1.0 - duty))
        finally:
            os.kill(pid, signal.SIGCONT)


def wait_until(due_s: float) -> None:
    """Sleep to just before, then watch the clock: late wake-ups would look like slowness."""
    left_s = due_s - time.perf_counter()
    if left_s > _SPIN_S:
        time.sleep(left_s - _SPIN_S / 2)
    while time.perf_counter() < due_s:
        time.sleep(0)
