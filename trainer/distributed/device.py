"""Where a rank computes and what it measures with: the clock asked for, or the one that fits here.

With CUDA the model and its gradients live on the device and its events give the times; what ranks
say to each other is staged through host memory (gloo), since a broken group must be left at once.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pacekeeper.core.errors import HostError
from pacekeeper.core.telemetry.attachment import Clock

CLOCKS = {"emulated": Clock.EMULATED, "cpu": Clock.CPU, "device": Clock.CUDA}
_BURN_SIZE = 256  # of the square matrices that a fault multiplies
_log = logging.getLogger(__name__)


def num_devices() -> int:
    """CUDA devices that torch can use here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose_clock(wanted: str, devices: int, default: str = "emulated") -> str:
    """The clock for `wanted`: "auto" takes the device's where there is one, else the default.

    Raises HostError where the device's is asked for and there is none.
    """
    if wanted == "device" and not devices:
        raise HostError(
            "clock 'device': torch sees no CUDA device here",
            remedy="choose --clock emulated or cpu, or see what `pacekeeper doctor` says",
        )
    if wanted == "auto":
        return "device" if devices else default
    return wanted


def say_clock(clock: str, wanted: str, devices: int, ranks: int) -> None:
    """What compute times rest on, before the first is measured."""
    chosen = ", chosen by itself" if wanted == "auto" else ""
    match clock:
        case "device":
            _log.info("clock=device%s: CUDA events, %d ranks on %d devices", chosen, ranks, devices)
            if ranks > devices:
                _log.warning("ranks share a device: their times count the work of each other")
        case "cpu":
            _log.info("clock=cpu%s: thread CPU time and stalls", chosen)
        case _:
            _log.info("clock=emulated%s: modelled device times, not measured ones", chosen)


def device_number(rank: int, node_of: Mapping[int, int], devices: int) -> int:
    """Of a rank on its node: the ranks of a node take its devices in turn."""
    here = sorted(other for other, node in node_of.items() if node == node_of[rank])
    return here.index(rank) % devices


def rank_device(clock: str, rank: int, node_of: Mapping[int, int]) -> torch.device:
    """Where this rank's tensors live; with CUDA it becomes the thread's current device."""
    if clock != "device":
        return torch.device("cpu")
    device = torch.device("cuda", device_number(rank, node_of, num_devices()))
    torch.cuda.set_device(device)
    return device


def device_uuid(device: torch.device) -> str:
    """As NVML names it; empty for the CPU."""
    if device.type == "cpu":
        return ""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def new_event() -> Any:
    """For DeviceEventClock."""
    return torch.cuda.Event(enable_timing=True)


@dataclass(slots=True, kw_only=True)
class DeviceBurner:
    """Real extra work on the device: (slowdown - 1) times a segment's own, before it is read.

    It waits for the device, which nothing else here does: only while a fault is on.
    """

    device: torch.device
    slowdown: float = 1.0

    def __call__(self, began: Any) -> None:
        if self.slowdown <= 1.0:
            return
        until_ms = self._since(began) * self.slowdown
        matrix = torch.ones(_BURN_SIZE, _BURN_SIZE, device=self.device)
        while self._since(began) < until_ms:
            torch.mm(matrix, matrix)

    def _since(self, began: Any) -> float:
        """Milliseconds of the device from `began` to the end of all that it was given."""
        now = new_event()
        now.record()
        now.synchronize()
        spent_ms: float = began.elapsed_time(now)
        return spent_ms
