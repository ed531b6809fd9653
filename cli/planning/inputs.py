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
EXPECTED = "expected .json, .csv, .npy or one recorded run"


def read_loads(path: Path) -> list[list[float]]:
    """Read the rows per layer and expert.

    Args:
        path: .json (list of lists), .csv (one layer per line), .npy, or a recorded run in any
            format that holds expert loads; those of all steps are added.

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
            case ".json":
                rows = json.loads(path.read_text())
            case _:
                return _recorded_loads(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    except UNREADABLE as error:
        raise DataError(
            f"{path}: {_reason_text(error)}",
            remedy=EXPECTED,
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


def _recorded_loads(path: Path) -> list[list[float]]:
    """Return the rows of a recorded run, [layers with experts, experts].

    Raises:
        DataError: it is no recorded run, or it holds no expert loads.
    """
    import numpy as np

    from pacekeeper.simulator.readers.registry import one_of, open_runs

    try:
        table = one_of(open_runs(path), path, None).expert_loads
    except DataError as error:  # its remedies are options of `replay`
        raise DataError(error.what, remedy=EXPECTED) from None
    if table is None or not len(table.rows):
        raise DataError(f"{path}: a recorded run without expert loads")
    _, layer = np.unique(table.layer, return_inverse=True)
    rows = np.zeros((int(layer.max()) + 1, int(table.expert.max()) + 1))
    np.add.at(rows, (layer, table.expert), table.rows)
    return [[float(load) for load in one] for one in rows]


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
    """Read the devices that hold each expert from a plan printed by `--json`, or EPLB's tables.

    Args:
        path: the file.
        num_devices: number of devices of the cluster.

    Returns:
        Device numbers, [layers, experts, replicas].

    Raises:
        DataError: the file is not a plan, or it names other devices.
    """
    try:
        is_numpy = path.suffix == ".npz"
        document: Any = _arrays(path) if is_numpy else json.loads(path.read_text())
        if "phy2log" in document:
            replicas = _replicas_of_tables(document, num_devices)
        else:
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


def _arrays(path: Path) -> dict[str, list[list[int]]]:
    """Read a .npz file. Raises OSError or one of UNREADABLE."""
    import numpy as np

    with np.load(path, allow_pickle=False) as file:
        return {name: file[name].tolist() for name in file.files}


def _replicas_of_tables(document: dict[str, Any], num_devices: int) -> list[list[list[int]]]:
    """Return the devices of each expert. Raises ValueError, TypeError or KeyError for others."""
    import numpy as np

    from pacekeeper.controller.planning.eplb import replicas_of

    table, counts = np.array(document["phy2log"]), np.array(document["logcnt"])
    if table.ndim != 2 or counts.ndim != 2 or table.dtype.kind not in "iu":
        raise ValueError("phy2log and logcnt must be whole numbers by layer")
    if table.shape[1] % num_devices or not ((table >= 0) & (table < counts.shape[1])).all():
        raise ValueError(f"phy2log must name experts in equal numbers of slots of {num_devices}")
    return replicas_of(table, num_devices, counts.shape[1])


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
