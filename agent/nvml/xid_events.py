"""Listens for Xids, the driver's error reports, in a thread of its own.

NVML delivers each Xid once; polling would see only the last of several. For a device without event
support the Xids are unknown, which is not the same as none.
"""

import ctypes
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pacekeeper.core.telemetry.samples import KEPT_XIDS

WAIT_MS = 1000  # of one call
JOIN_TIMEOUT_S = 3.0  # longer than one wait; a thread that takes longer hangs
XID_EVENT = 0x8  # nvmlEventTypeXidCriticalError
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class XidHistory:
    """Number of Xids of a device since the start of the agent, and the newest ones in order."""

    count: int = 0
    newest: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class XidListener:
    """The thread that waits for events, and the Xids by device index."""

    pynvml: Any
    events: Any
    index_of: Mapping[int, int]  # device index by the address of its handle
    histories: Mapping[int, XidHistory]
    is_driver_gone: bool = False
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @classmethod
    def begin(
        cls, pynvml: Any, handles: Mapping[int, Any], *, known: Mapping[int, XidHistory]
    ) -> "XidListener | None":
        """Register for events and start the thread.

        Args:
            pynvml: The binding.
            handles: Devices by index.
            known: Xids from before NVML was reopened, by device index.

        Returns:
            The listener; None if the driver supports no events.
        """
        try:
            events = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError as error:
            _log.info("nvml xids: %s", error)
            return None
        index_of = {}
        for index, handle in handles.items():
            try:
                pynvml.nvmlDeviceRegisterEvents(handle, XID_EVENT, events)
            except pynvml.NVMLError as error:
                _log.info("nvml device=%d xids: %s", index, error)
                continue
            index_of[_address(handle)] = index
        histories = {index: known.get(index, XidHistory()) for index in index_of.values()}
        watch = cls(pynvml=pynvml, events=events, index_of=index_of, histories=histories)
        watch._thread = threading.Thread(target=watch._run, name="nvml-xids", daemon=True)
        watch._thread.start()
        return watch

    def of(self, index: int) -> XidHistory | None:
        """The Xids of a device; None if it supports no events. Never blocks."""
        return None if self.is_driver_gone else self.histories.get(index)

    def close(self) -> bool:
        """End the thread. False if it hangs in a call: NVML must not be shut down then."""
        self._stop.set()
        assert self._thread is not None
        self._thread.join(JOIN_TIMEOUT_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                event = self.pynvml.nvmlEventSetWait_v2(self.events, WAIT_MS)
            except self.pynvml.NVMLError as error:
                if error.value == self.pynvml.NVML_ERROR_TIMEOUT:
                    continue
                if error.value == self.pynvml.NVML_ERROR_UNINITIALIZED:
                    self.is_driver_gone = True
                    break
                self._stop.wait(
                    WAIT_MS / 1000
                )  # an error of one device; the others still deliver events
                continue
            if event.eventType == XID_EVENT:
                self._record(self.index_of.get(_address(event.device)), int(event.eventData))
        try:
            self.pynvml.nvmlEventSetFree(self.events)
        except self.pynvml.NVMLError as error:
            _log.info("nvml xids: %s", error)

    def _record(self, index: int | None, xid: int) -> None:
        _log.warning("nvml device=%s xid=%d", index, xid)
        if index is None:
            return
        before = self.histories[index]  # only this thread writes
        newest = (*before.newest, xid)[-KEPT_XIDS:]
        self.histories = {
            **self.histories,
            index: XidHistory(count=before.count + 1, newest=newest),
        }


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
