"""Which device a rank computes on: asked for, or chosen by what this node has."""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from pacekeeper.core.errors import HostError

_log = logging.getLogger(__name__)


def num_devices() -> int:
    """Return the number of CUDA devices that torch can use here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose_device(wanted: str, devices: int, ranks_on_node: int) -> str:
    """Return "cuda" or "cpu".

    Args:
        wanted: "auto", "cuda" or "cpu".
        devices: CUDA devices of this node.
        ranks_on_node: Ranks of this node; each needs a device of its own.

    Raises:
        HostError: CUDA is asked for and there are too few devices.
    """
    if wanted == "cpu" or (wanted == "auto" and not devices):
        return "cpu"
    if not devices:
        raise HostError(
            "device cuda: torch sees no CUDA device here",
            remedy="use --device cpu, or see what `pacekeeper doctor` says",
        )
    if ranks_on_node > devices:
        raise HostError(
            f"{ranks_on_node} ranks and {devices} CUDA devices on this node: each rank needs one",
            remedy="lower --ranks-per-node, or use --device cpu",
        )
    return "cuda"


def log_device(device: str, wanted: str, *, devices: int, ranks: int) -> None:
    """Log what the ranks of this node compute on, before the first is started."""
    chosen = " (chosen automatically)" if wanted == "auto" else ""
    if device == "cuda":
        _log.info("device=cuda%s: %d ranks on %d devices", chosen, ranks, devices)
    else:
        _log.info("device=cpu%s: %d ranks", chosen, ranks)


def device_number(rank: int, node_of: Mapping[int, int]) -> int:
    """Return the number of a rank's device on its node: its place among the ranks there."""
    here = sorted(other for other, node in node_of.items() if node == node_of[rank])
    return here.index(rank)


def device_uuid(device: torch.device) -> str:
    """Return the device's name in NVML; empty for the CPU."""
    if device.type == "cpu":
        return ""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def new_event() -> Any:
    """Return an event for `DeviceEventClock`."""
    return torch.cuda.Event(enable_timing=True)
