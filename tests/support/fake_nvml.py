"""A driver on paper for the real `nvidia-ml-py`: compiled from C, changed while somebody reads it.

`Driver` holds the mapped file that the library reads; the names are those of `fake_nvml.c`.
"""

import ctypes
import mmap
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_suffix(".c")
VARIABLE = "PACEKEEPER_FAKE_NVML"
SONAME = "libnvidia-ml.so.1"
NOT_TOLD = -(1 << 63)
UINT, WIDE = 1, 3  # nvmlValueType_t
_MAX_DEVICES, _MAX_PIDS, _MAX_XIDS, _MAX_FIELDS = 16, 8, 64, 512


class Field(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_uint32),
        ("scope", ctypes.c_uint32),
        ("type", ctypes.c_uint32),
        ("code", ctypes.c_uint32),
        ("value", ctypes.c_uint64),
    )


_NUMBERS = (
    *("code", "delay_us"),
    *("sm_clock", "sm_clock_max", "memory_clock", "memory_clock_max", "sm_clock_set"),
    *("temperature", "margin", "power_mw", "power_limit_mw", "energy_mj", "utilisation"),
    *("memory_used", "reasons", "pcie_generation", "pcie_width", "pcie_generation_max"),
    *("pcie_width_max", "pcie_replays", "ecc_uncorrected", "rows_without_spare"),
    *("sm_active_percent", "tensor_active_percent", "memory_active_percent"),
    *("num_links", "num_instances", "num_pids", "num_xids", "num_fields"),
)


class Device(ctypes.Structure):
    """One GPU. A number that is NOT_TOLD is not supported by it."""

    _fields_ = (
        ("uuid", ctypes.c_char * 96),
        ("name", ctypes.c_char * 96),
        *((name, ctypes.c_int64) for name in _NUMBERS),
        ("pids", ctypes.c_int64 * _MAX_PIDS),
        ("xids", ctypes.c_int64 * _MAX_XIDS),
        ("fields", Field * _MAX_FIELDS),
    )

    def report_xid(self, xid: int) -> None:
        """The driver reports an error."""
        self.xids[self.num_xids % _MAX_XIDS] = xid
        self.num_xids += 1

    def tell(self, field: int, value: int, *, scope: int = 0, kind: int = WIDE) -> None:
        """Answer a field value from now on."""
        for entry in self.fields[: self.num_fields]:
            if (entry.id, entry.scope) == (field, scope):
                entry.value, entry.type = value, kind
                return
        self.fields[self.num_fields] = Field(id=field, scope=scope, type=kind, code=0, value=value)
        self.num_fields += 1


class _State(ctypes.Structure):
    _fields_ = (
        ("init_code", ctypes.c_int64),
        ("life", ctypes.c_int64),
        ("num_devices", ctypes.c_int64),
        ("num_calls", ctypes.c_int64),
        ("devices", Device * _MAX_DEVICES),
    )


HEALTHY: Mapping[str, int] = {
    "sm_clock": 1900, "sm_clock_max": 1980, "memory_clock": 2619, "memory_clock_max": 2619,
    "sm_clock_set": 1980, "temperature": 55, "margin": 32, "power_mw": 600_000,
    "power_limit_mw": 700_000, "energy_mj": 1_000_000, "utilisation": 99, "memory_used": 1 << 33,
    "reasons": 0, "pcie_generation": 5, "pcie_width": 16, "pcie_generation_max": 5,
    "pcie_width_max": 16, "num_links": 18, "sm_active_percent": 80, "tensor_active_percent": 40,
    "memory_active_percent": 50, "num_pids": 1,
}  # fmt: skip
# Field value -> (type, value): what an H100 of a 580 driver tells.
FIELDS: Mapping[int, tuple[int, int]] = {
    **dict.fromkeys((74, 75, 76, 77, 79, 251, 252, 253), (WIDE, 0)),
    **dict.fromkeys((3, 6, 169, 174, 175, 176, 177, 178, 179, 180, 182, 183), (WIDE, 0)),
    **dict.fromkeys((142, 143, 144, 145, 230), (UINT, 0)),
    82: (UINT, 62), 186: (UINT, 610_000), 188: (UINT, 700_000), 189: (UINT, 700_000),
    197: (WIDE, 1 << 20), 198: (WIDE, 1 << 21),
}  # fmt: skip
LINK_FIELDS: Mapping[int, tuple[int, int]] = {
    165: (UINT, 1), 164: (UINT, 26_562), 161: (WIDE, 0), 162: (WIDE, 0), 163: (WIDE, 0),
}  # fmt: skip
ALL_LINKS = 0xFFFFFFFF


class Driver:
    """Devices that are well, until a test changes them."""

    def __init__(self, path: Path, num_devices: int = 1) -> None:
        self.path = path
        path.write_bytes(bytes(ctypes.sizeof(_State)))
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        self._state = _State.from_buffer(mapped)
        self._state.num_devices = num_devices
        for index in range(num_devices):
            self._fill(self._state.devices[index], index)

    @property
    def devices(self) -> Any:
        """By index."""
        return self._state.devices

    @property
    def num_calls(self) -> int:
        """Answered so far."""
        return int(self._state.num_calls)

    def refuse(self, code: int) -> None:
        """It can not be initialised: with 0 it can again."""
        self._state.init_code = code

    def restart(self) -> None:
        """Another life: who was initialised before is so no more."""
        self._state.life += 1

    def _fill(self, device: Device, index: int) -> None:
        device.uuid, device.name = f"GPU-{index}".encode(), b"NVIDIA H100 80GB HBM3"
        for name, value in HEALTHY.items():
            setattr(device, name, value)
        device.pids[0] = 1000 + index
        for field, (kind, value) in FIELDS.items():
            device.tell(field, value, kind=kind)
        for field in (138, 139):
            device.tell(field, 1 << 30, scope=ALL_LINKS)
        for link in range(device.num_links):
            for field, (kind, value) in LINK_FIELDS.items():
                device.tell(field, value, scope=link, kind=kind)


def compiler() -> str | None:
    """A C compiler, where there is one."""
    return shutil.which("gcc") or shutil.which("cc")


def build(folder: Path, *, soname: str = SONAME) -> Path:
    """Compile the library into `folder`; raises CalledProcessError with what the compiler said."""
    name = compiler()
    assert name is not None
    target = folder / soname
    command = [name, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-o", str(target)]
    subprocess.run([*command, f"-Wl,-soname,{soname}", str(SOURCE)], check=True)
    return target


def environment(library: Path, driver: Driver) -> dict[str, str]:
    """For a process that is to find this library in place of a real one."""
    found = os.environ.get("LD_LIBRARY_PATH")
    paths = [str(library.parent), *([found] if found else [])]
    return {"LD_LIBRARY_PATH": ":".join(paths), VARIABLE: str(driver.path)}
