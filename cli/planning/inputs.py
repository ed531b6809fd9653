"""Inputs of `pacekeeper plan`: loads, the placement in use, values by device.

Every error names the file or option and what was expected.
"""

import json
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from pacekeeper.core.errors import ConfigError, DataError

# Raised by json and numpy for damaged, empty, deeply nested or implausibly large input.
UNREADABLE = (
    ValueError, RecursionError, OverflowError, EOFError, BadZipFile, MemoryError,
)  # fmt: skip


def read_loads(path: Path) -> list[list[float]]:
    """Read the rows per layer and expert.

    Args:
        path: .json (list of lists), .csv (one layer per line) or .npy.

    Returns:
        Rows, [layers, experts].

    Raises:
        DataError: the file is not readable or has another shape.
    """
    try:
        match path.suffix:
            case ".npy":
                rows: Any = _npy(path)
            case ".csv":
                lines = path.read_text().splitlines()
                rows = [[float(x) for x in line.split(",")] for line in lines if line.strip()]
            case _:
                rows = json.loads(path.read_text())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    except UNREADABLE as error:
        raise DataError(
            f"{path}: {_reason_text(error)}", remedy="expected .json, .csv or .npy"
        ) from None
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{path}: expected one list of loads per layer")
    if not isinstance(rows[0], list):
        rows = [rows]  # one layer
    sizes = {len(row) if isinstance(row, list) else 0 for row in rows}
    numbers = (x for row in rows for x in row) if len(sizes) == 1 else ()
    if (
        len(sizes) != 1
        or 0 in sizes
        or any(isinstance(x, bool) or not isinstance(x, int | float) for x in numbers)
    ):
        raise DataError(f"{path}: expected the same number of loads in every layer")
    try:
        return [[float(x) for x in row] for row in rows]
    except OverflowError:
        raise DataError(f"{path}: expected loads below 1e308") from None


def _npy(path: Path) -> Any:
    """Read a .npy file. Raises OSError or one of UNREADABLE."""
    import numpy as np

    array = np.load(path, allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise ValueError("several arrays (.npz)")
    return array.tolist()


def _reason_text(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def read_replica_ranks(path: Path, num_devices: int) -> list[list[list[int]]]:
    """Read the devices that hold each expert from a plan printed by `--json`.

    Args:
        path: the file.
        num_devices: number of devices of the cluster.

    Returns:
        Device numbers, [layers, experts, replicas].

    Raises:
        DataError: the file is not a plan, or it names other devices.
    """
    try:
        document = json.loads(path.read_text())
        replicas = [
            [[_device(replica["device"]) for replica in on] for on in at]
            for at in document["replicas"]
        ]
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    except (*UNREADABLE, KeyError, TypeError) as error:
        what = f"{path}: not a plan ({type(error).__name__}: {_reason_text(error)})"
        raise DataError(
            what, remedy="use the output of `pacekeeper plan placement --json`"
        ) from None
    for device in (device for layer in replicas for on in layer for device in on):
        if not 0 <= device < num_devices:
            raise DataError(
                f"{path}: device {device} is not one of 0 to {num_devices - 1}",
                remedy="remove the devices that no longer exist from the file",
            )
    return replicas


def _device(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"device {value}")
    return value


def parse_device_values(
    text: str, num_devices: int, default: float, option: str
) -> tuple[float, ...]:
    """Parse "DEVICE=VALUE,..." into one value per device.

    Args:
        text: value of the option.
        num_devices: number of devices.
        default: value of devices that are not named.
        option: name of the option, for errors.

    Raises:
        ConfigError: the text has another form, or names an unknown device or one twice.
    """
    named: dict[int, float] = {}
    for part in filter(None, text.split(",")):
        device, _, value = part.partition("=")
        try:
            at, values_at = int(device), float(value)
        except ValueError:
            raise ConfigError(f"{option}: expected DEVICE=NUMBER,..., got '{part}'") from None
        if not 0 <= at < num_devices:
            raise ConfigError(f"{option}: expected devices 0 to {num_devices - 1}, got {at}")
        if at in named:
            raise ConfigError(f"{option}: device {at} is named twice")
        named[at] = values_at
    return tuple(named.get(device, default) for device in range(num_devices))
