"""Copies of a rank's state in host memory: what they hold is the state as it was when they began.

From host memory they are made at once, and training waits for that. From a device they go to
pinned memory over a stream of their own, beside the next forward and backward: nothing changes the
state before they have arrived, so whoever is about to change it settles them first.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from pacekeeper.trainer.groups.devices import new_event

T = TypeVar("T")


class ToHost(Protocol):
    """Makes one copy, or begins to."""

    def __call__(self, tensor: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """These rows of it, or all, in host memory."""


class Arrival(Protocol):
    """Of copies that were begun together; any thread may wait for it."""

    def wait(self) -> float:
        """Until all are there; seconds that they took beside the training."""


class _There:
    def wait(self) -> float:
        return 0.0


THERE: Arrival = _There()


class HostCopies:
    """One rank's, of state in host memory. `make` and `settle` are the training thread's."""

    is_beside = False  # or training waits for each

    def make(self, copy: Callable[[ToHost], T]) -> tuple[T, Arrival]:
        """What `copy` returns, of copies that hold what they should once they have arrived."""
        return copy(at_once), THERE

    def settle(self) -> tuple[float, float]:
        """Until all that were begun are there; seconds of waiting for them, and the longest that
        they took beside the training.
        """
        return 0.0, 0.0


class DeviceCopies(HostCopies):
    """Of state on a CUDA device. torch keeps pinned memory that is let go for the next copies."""

    is_beside = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._open: list[Arrival] = []

    def make(self, copy: Callable[[ToHost], T]) -> tuple[T, Arrival]:
        began, ended = new_event(), new_event()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # the last update
        with torch.cuda.stream(self._stream):
            began.record()
            found = copy(_pinned)
            ended.record()
        arrival = _Events(began, ended, self._device)
        self._open.append(arrival)
        return found, arrival

    def settle(self) -> tuple[float, float]:
        began_s, took_s = time.monotonic(), 0.0
        for arrival in self._open:
            took_s = max(took_s, arrival.wait())
        self._open.clear()
        return time.monotonic() - began_s, took_s


def host_copies(device: torch.device) -> HostCopies:
    """The kind that state on this device needs."""
    return DeviceCopies(device) if device.type == "cuda" else HostCopies()


def at_once(tensor: Tensor, rows: Sequence[int] | None = None) -> Tensor:
    """A copy that training waits for."""
    if rows is not None:  # indexing copies
        return tensor[list(rows)].to("cpu").contiguous()
    return tensor.to("cpu", copy=True).contiguous()


def _pinned(tensor: Tensor, rows: Sequence[int] | None = None) -> Tensor:
    if rows is None:
        found = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return found.copy_(tensor, non_blocking=True)
    shape = (len(rows), *tensor.shape[1:])
    found = torch.empty(shape, dtype=tensor.dtype, pin_memory=True)
    for place, row in enumerate(rows):  # a list of rows as an index would make the host wait
        found[place].copy_(tensor[row], non_blocking=True)
    return found


class _Events:
    def __init__(self, began: Any, ended: Any, device: torch.device) -> None:
        self._began, self._ended, self._device = began, ended, device

    def wait(self) -> float:
        with torch.cuda.device(self._device):  # a new thread would take memory of the first one
            self._ended.synchronize()
            took_ms: float = self._began.elapsed_time(self._ended)
        return took_ms / 1e3
