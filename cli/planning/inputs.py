"""What `pacekeeper plan` reads: loads, earlier plans, values by device. One clear line if wrong."""

import json
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from pacekeeper.core.errors import ConfigError, DataError

# What json and numpy raise at what is damaged, empty, endlessly nested, or says it is huge.
UNREADABLE = (
    ValueError, RecursionError, OverflowError, EOFError, BadZipFile, MemoryError,
)  # fmt: skip


def read_loads(path: Path) -> list[list[float]]:
    """[layers, experts] rows from .json (list of lists), .csv (a layer per line) or .npy.

    Raises DataError where the file can not be read as that.
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
        raise DataError(f"{path}: {_why(error)}", remedy="expected .json, .csv or .npy") from None
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
        raise DataError(f"{path}: expected as many numbers in every layer")
    try:
        return [[float(x) for x in row] for row in rows]
    except OverflowError:
        raise DataError(f"{path}: expected loads below 1e308") from None


def _npy(path: Path) -> Any:
    """The rows of a .npy file. Raises OSError or one of UNREADABLE."""
    import numpy as np

    array = np.load(path, allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise ValueError("several arrays (.npz)")
    return array.tolist()


def _why(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def read_hosts(path: Path, num_devices: int) -> list[list[list[int]]]:
    """By layer and expert the devices of a plan that `--json` printed.

    Raises DataError where the file is none, or is of other devices than 0 .. num_devices - 1.
    """
    try:
        document = json.loads(path.read_text())
        hosts = [
            [[_device(host["device"]) for host in on] for on in at] for at in document["hosts"]
        ]
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    except (*UNREADABLE, KeyError, TypeError) as error:
        why = f"{path}: no plan ({type(error).__name__}: {_why(error)})"
        raise DataError(why, remedy="give what --json printed") from None
    for device in (device for layer in hosts for on in layer for device in on):
        if not 0 <= device < num_devices:
            raise DataError(
                f"{path}: a plan of other devices: it names {device}, of 0 to {num_devices - 1}",
                remedy="take out of it the hosts that are gone",
            )
    return hosts


def _device(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"device {value}")
    return value


def by_device(text: str, num_devices: int, usual: float, option: str) -> tuple[float, ...]:
    """Values of all devices from "DEVICE=VALUE,..". Raises ConfigError for anything else."""
    named: dict[int, float] = {}
    for part in filter(None, text.split(",")):
        device, _, value = part.partition("=")
        try:
            at, values_at = int(device), float(value)
        except ValueError:
            raise ConfigError(f"{option}: expected DEVICE=NUMBER,.., got '{part}'") from None
        if not 0 <= at < num_devices:
            raise ConfigError(f"{option}: expected devices 0 to {num_devices - 1}, got {at}")
        if at in named:
            raise ConfigError(f"{option}: device {at} is named twice")
        named[at] = values_at
    return tuple(named.get(device, usual) for device in range(num_devices))
