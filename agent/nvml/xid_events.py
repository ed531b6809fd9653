"""Listens for Xids, the driver's reports of errors, in a thread of its own: each is told once.

Polling would see the last of several. A device that can not be listened to tells nothing, which is
not the same as none.
"""

import ctypes
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pacekeeper.core.telemetry.samples import KEPT_XIDS

WAIT_MS = 1000  # of one call of the driver
JOIN_TIMEOUT_S = 3.0  # more than one wait: who is not back by then hangs
XID_EVENT = 0x8  # nvmlEventTypeXidCriticalError
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class XidHistory:
    """How many a device has had since it is listened to, and the newest of them, in order."""

    count: int = 0
    newest: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class XidListener:
    """The thread that waits, and what it heard of each device it can hear."""

    pynvml: Any
    events: Any
    index_of: Mapping[int, int]  # of the device with a handle at this address
    heard: Mapping[int, XidHistory]
    is_deaf: bool = False  # the driver is gone
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @classmethod
    def begin(
        cls, pynvml: Any, handles: Mapping[int, Any], *, known: Mapping[int, XidHistory]
    ) -> "XidListener | None":
        """Listen to these devices by index; None where the driver lets nobody listen.

        `known`: what was heard of them before the driver was opened anew.
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
        heard = {index: known.get(index, XidHistory()) for index in index_of.values()}
        watch = cls(pynvml=pynvml, events=events, index_of=index_of, heard=heard)
        watch._thread = threading.Thread(target=watch._run, name="nvml-xids", daemon=True)
        watch._thread.start()
        return watch

    def of(self, index: int) -> XidHistory | None:
        """What was heard of a device; None where it can not be heard. Never waits."""
        return None if self.is_deaf else self.heard.get(index)

    def close(self) -> bool:
        """End the thread; False where it hangs in the driver, which must not be shut down then."""
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
                    self.is_deaf = True
                    break
                self._stop.wait(WAIT_MS / 1000)  # of a lost device: the others are still heard
                continue
            if event.eventType == XID_EVENT:
                self._hear(self.index_of.get(_address(event.device)), int(event.eventData))
        try:
            self.pynvml.nvmlEventSetFree(self.events)
        except self.pynvml.NVMLError as error:
            _log.info("nvml xids: %s", error)

    def _hear(self, index: int | None, xid: int) -> None:
        _log.warning("nvml device=%s xid=%d", index, xid)
        if index is None:
            return
        before = self.heard[index]  # only this thread writes
        newest = (*before.newest, xid)[-KEPT_XIDS:]
        self.heard = {**self.heard, index: XidHistory(count=before.count + 1, newest=newest)}


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
