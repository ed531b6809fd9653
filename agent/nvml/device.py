"""One GPU in NVML, and the function that queries it; each query may fail by itself."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pacekeeper.agent.nvml.fields import Key
from pacekeeper.agent.nvml.gpm import Activity

Query = Callable[[Any, Any], Any]  # called with the binding and a handle


class DeviceLostError(Exception):
    """The device fell off the bus or must be reset."""


class DriverGoneError(Exception):
    """The driver was unloaded or replaced: all handles are invalid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One MIG instance of a device: its own handle, UUID and name."""

    handle: Any
    uuid: str
    name: str


@dataclass(slots=True, kw_only=True)
class Device:
    """One GPU: its handle, the queries it does not support, and its last slow answers."""

    index: int
    handle: Any
    uuid: str = ""
    is_lost: bool = False
    refused: set[str] = field(default_factory=set)
    refused_fields: frozenset[Key] = frozenset()
    num_links: int = 0
    counters: dict[str, Any] = field(default_factory=dict)  # fields of a sample
    health: dict[str, Any] = field(default_factory=dict)  # fields of a DeviceHealth
    slow: dict[str, Any] = field(default_factory=dict)
    activity: Activity | None = None
    instances: tuple[Instance, ...] = ()
    fields_due_s: float | None = None
    slow_due_s: float | None = None


def query(pynvml: Any, device: Device, name: str, question: Query) -> Any:
    """Run one query of a device.

    Args:
        pynvml: The binding.
        device: Its `refused` collects the queries that device, driver or binding do not support.
        name: Identifies the query.
        question: Runs it.

    Returns:
        The answer; None if the query fails or is not supported.

    Raises:
        DeviceLostError: The device fell off the bus or must be reset.
        DriverGoneError: The driver was unloaded or replaced.
    """
    if name in device.refused:
        return None
    try:
        return question(pynvml, device.handle)
    except AttributeError:  # an older binding
        device.refused.add(name)
        return None
    except pynvml.NVMLError as error:
        code = getattr(error, "value", None)
        if code in (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED):
            raise DeviceLostError(str(error)) from None
        if code in (
            pynvml.NVML_ERROR_UNINITIALIZED,
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
            pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        ):
            raise DriverGoneError(str(error)) from None
        if code in (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND):
            device.refused.add(name)
        return None


def text(value: str | bytes | None) -> str:
    """A name as text; empty for None."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""
