"""Samples NVML periodically in its own thread, so that a hung driver does not stop the agent.

Queries load the driver: a slow driver is sampled less often (REST_FACTOR).
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping

from pacekeeper.agent.nvml.client import Nvml, NvmlUnavailable, open_nvml
from pacekeeper.agent.nvml.device import DriverGoneError
from pacekeeper.agent.nvml.xid_events import XidHistory
from pacekeeper.core.telemetry.samples import DeviceSample

HUNG_S = 10.0  # longer queries are reported as hanging
REOPEN_S = 60.0  # between two attempts without a driver or with a lost device
RETRY_S = 5.0  # after the driver disappeared: it may be restarting
REST_FACTOR = 20.0  # pause / query time at least: queries take at most 5 % of the time
_log = logging.getLogger(__name__)

Opener = Callable[[Mapping[int, XidHistory]], Nvml | NvmlUnavailable]


class Sampler:
    """Samples all devices. `latest` and `waiting_s` never block."""

    def __init__(self, interval_s: float, opener: Opener = open_nvml) -> None:
        self._interval_s = interval_s
        self._open = opener
        self._stop = threading.Event()
        self._asked_s: float | None = None  # start of the query under way
        self._latest: tuple[tuple[DeviceSample, ...], str] = ((), "not queried yet")
        self.rounds = 0
        self.spent_s = 0.0

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="nvml", daemon=True).start()

    def stop(self) -> None:
        """Signal the thread to end, without waiting for it."""
        self._stop.set()

    def latest(self, now_s: float) -> tuple[tuple[DeviceSample, ...], str]:
        """The newest samples, and "ok" or why samples of some or all devices are missing."""
        if self.waiting_s(now_s) > HUNG_S:
            return (), f"NVML hangs: no answer for more than {HUNG_S:g} s"
        return self._latest

    def waiting_s(self, now_s: float) -> float:
        """Age of the query under way in seconds; 0 between queries."""
        asked_s = self._asked_s
        return 0.0 if asked_s is None else max(0.0, now_s - asked_s)

    def _run(self) -> None:
        nvml: Nvml | None = None
        known: Mapping[int, XidHistory] = {}
        was_there = False
        opened_s = 0.0
        while not self._stop.is_set():
            now_s = self._asked_s = time.monotonic()
            if nvml is not None and nvml.lost and now_s - opened_s > REOPEN_S:
                known = _close(nvml)
                nvml = None
            if nvml is None:
                found = self._opened(known)
                opened_s = now_s
                if isinstance(found, NvmlUnavailable):
                    self._publish((), found.reason)
                    self._stop.wait(RETRY_S if was_there else REOPEN_S)
                    continue
                nvml, was_there = found, True
            try:
                samples = nvml.sample(now_s)
            except Exception as error:  # of driver or binding: reported; the agent continues
                known = _close(nvml)
                nvml = None
                self._publish((), _describe(error))
                self._stop.wait(RETRY_S)
                continue
            took_s = time.monotonic() - now_s
            self.rounds, self.spent_s = self.rounds + 1, self.spent_s + took_s
            self._publish(samples, "; ".join(nvml.lost) or "ok")
            # The first round finds the supported queries and takes longer than others.
            rest_s = min(REOPEN_S, took_s * REST_FACTOR) if self.rounds > 1 else 0.0
            self._stop.wait(max(self._interval_s - took_s, rest_s))
        if nvml is not None:
            nvml.close()

    def _opened(self, known: Mapping[int, XidHistory]) -> Nvml | NvmlUnavailable:
        try:
            return self._open(known)
        except Exception as error:
            return NvmlUnavailable(reason=_describe(error))

    def _publish(self, samples: tuple[DeviceSample, ...], state: str) -> None:
        self._asked_s = None
        if state != self._latest[1]:
            _log.info("nvml=%r devices=%d", state, len(samples))
        self._latest = (samples, state)


def _describe(error: Exception) -> str:
    if isinstance(error, DriverGoneError):
        return f"the driver is gone: {error}"
    return f"reading NVML failed: {error!r:.200}"


def _close(nvml: Nvml) -> Mapping[int, XidHistory]:
    """Close NVML and return the Xids of its devices, for the next one."""
    nvml.close()
    return {} if nvml.watch is None else nvml.watch.histories
