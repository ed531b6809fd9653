"""Groups that torch 2.15 and later reconfigures in place: nccl2 on CUDA, and gloo.

Each backend serves one generation after the other. The functions are private to torch; this is the
only module that knows them.
"""

import secrets
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import Store

from pacekeeper.trainer.groups.elastic import Backend
from pacekeeper.trainer.groups.gloo import GLOO_TIMEOUT_FACTOR, fail_connections
from pacekeeper.trainer.groups.waiting import WaitLimits

c10d: Any = _distributed_c10d  # the stubs of torch before 2.15 lack the names used here


def can_reconfigure(device: torch.device) -> bool:
    """Whether groups of tensors on `device` can be reconfigured by this torch."""
    needed = "ProcessGroupGloo" if device.type == "cpu" else "ProcessGroupNCCL2"
    return hasattr(c10d, "ReconfigureOptions") and hasattr(c10d, needed)


class ReconfiguringConnector:
    """Connects by reconfiguring a backend that an earlier generation has left.

    Args:
        device: Of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[tuple[Backend, _CurrentStore]] = []
        self._lock = threading.Lock()

    def connect(
        self, store: Store, position: int, size: int, limits: WaitLimits
    ) -> "ReconfiguredConnection":
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread
        with self._lock:
            backend, current = self._free.pop() if self._free else (None, _CurrentStore())
        current.store = store
        if backend is None:
            backend = self._make(current, position, size, limits)
        store.set(f"handle/{position}", backend.get_reconfigure_handle())
        if position == 0:
            store.set("uuid", str(secrets.randbits(62)))
        keys = [f"handle/{other}" for other in range(size)]
        patience = timedelta(seconds=limits.connect_s)
        store.wait([*keys, "uuid"], patience)
        options = c10d.ReconfigureOptions()
        options.uuid = int(store.get("uuid"))
        options.handles = [store.get(key).decode() for key in keys]
        options.timeout = patience
        backend.reconfigure(options).wait()
        return ReconfiguredConnection(
            backend, self._device, lambda ended: self._keep(ended, current)
        )

    def _keep(self, backend: Backend, current: "_CurrentStore") -> None:
        with self._lock:
            self._free.append((backend, current))

    def _make(
        self, current: "_CurrentStore", position: int, size: int, limits: WaitLimits
    ) -> Backend:
        timeout = timedelta(seconds=GLOO_TIMEOUT_FACTOR * limits.timeout_s)
        if self._device.type == "cpu":
            return c10d.ProcessGroupGloo(
                current, position, size, timeout=timeout, enable_reconfigure=True
            )
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout, options.enable_reconfigure = timeout, True
        return c10d.ProcessGroupNCCL2(current, position, size, options, None)


class ReconfiguredConnection:
    """A backend in the service of one generation."""

    def __init__(
        self, backend: Backend, device: torch.device, keep: Callable[[Backend], None]
    ) -> None:
        self.backend = backend
        self.blocks_host = device.type == "cpu"
        self._keep = keep

    def interrupt(self) -> None:
        if self.blocks_host:
            fail_connections(self.backend)  # gloo's own abort does nothing
        else:
            self.backend.abort()  # may wait for the kernels of other groups, which abort, too

    def retire(self, *, is_idle: bool) -> None:
        if is_idle:  # else a collective still holds one of its two threads
            self._keep(self.backend)
        self.backend = None


class _CurrentStore(Store):
    """The store of the generation that a backend serves; torch wants one for a backend's life.

    Attributes:
        store: Of the current generation; a node that hosted an earlier one may be gone.
    """

    store: Store

    def clone(self) -> Store:
        return self

    def set(self, key: str, value: Any) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        return self.store.get(key)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self.store.delete_key(key)

    def has_extended_api(self) -> bool:
        return False

    def add(self, key: str, value: int) -> int:
        return self.store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self.store.wait(keys)
        else:
            self.store.wait(keys, timeout)
