"""Samples the node's kernel: load, pressure, memory, swap, network, clock. A shell.

Reads small files below /proc and /sys at the interval of the device samples. A file that is missing
or has another format gives None.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pacekeeper.agent.host import wall_clock
from pacekeeper.agent.host.network import MAX_COUNT, NetworkCounters, is_count
from pacekeeper.core.telemetry.samples import HostSample

_PRESSURES = ("cpu", "io", "memory")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True, kw_only=True)
class HostSampler:
    """The kernel of this node, sampled once per `interval_s` at most. Never blocks or raises."""

    interval_s: float
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    clock: Callable[[], dict[str, Any]] = wall_clock.read
    _latest: HostSample | None = None
    _swapped: dict[str, int] = field(default_factory=dict)  # pages in and out, since boot
    _network: NetworkCounters = field(init=False)

    def __post_init__(self) -> None:
        self._network = NetworkCounters(proc=self.proc, sys=self.sys)

    def latest(self, now_s: float) -> HostSample:
        """The newest sample. `now_s`: monotonic clock."""
        if self._latest is None or now_s - self._latest.sampled_s >= self.interval_s:
            self._latest = self._read(now_s)
        return self._latest

    def _read(self, now_s: float) -> HostSample:
        load = [_number(word) for word in self._text("loadavg").split()[:3]]
        memory = _by_name(self._text("meminfo"))
        pressure: dict[str, Any] = {
            f"{name}_{kind}_ratio": value
            for name in _PRESSURES
            for kind, value in _pressures(self._text(f"pressure/{name}")).items()
        }
        return HostSample(
            sampled_s=now_s,
            num_cores=os.cpu_count(),
            load_1min=load[0] if len(load) == 3 else None,
            load_5min=load[1] if len(load) == 3 else None,
            load_15min=load[2] if len(load) == 3 else None,
            memory_bytes=_from_kib(memory.get("MemTotal:")),
            memory_available_bytes=_from_kib(memory.get("MemAvailable:")),
            **pressure,
            **self._swap_rates(now_s),
            **self._network.read(now_s),
            **self.clock(),
        )

    def _swap_rates(self, now_s: float) -> dict[str, Any]:
        """Bytes per second since the previous reading; empty at the first one."""
        lines = self._text("vmstat").splitlines()  # about 200
        known = _by_name("\n".join(line for line in lines if line.startswith("pswp")))
        pages: dict[str, int] = {
            name: known[name] for name in ("pswpin", "pswpout") if name in known
        }
        before, self._swapped = self._swapped, pages
        passed_s = 0.0 if self._latest is None else now_s - self._latest.sampled_s
        if passed_s <= 0.0:
            return {}
        fields = {"pswpin": "swap_in_bytes_per_s", "pswpout": "swap_out_bytes_per_s"}
        return {
            fields[name]: max(0, pages[name] - before[name]) * _PAGE_BYTES / passed_s
            for name in pages
            if name in before
        }

    def _text(self, name: str) -> str:
        try:
            return (self.proc / name).read_text(encoding="ascii", errors="replace")
        except OSError:
            return ""


def _pressures(text: str) -> dict[str, float]:
    """Shares of the last 10 s from lines such as "some avg10=1.53 avg60=..." (percent)."""
    found = {}
    for line in text.splitlines():
        kind, _, rest = line.partition(" avg10=")
        percent = _number(rest.partition(" ")[0])
        if kind in ("some", "full") and percent is not None:
            found[kind] = percent / 100.0
    return found


def _by_name(text: str) -> dict[str, int]:
    """The first number behind each name: "MemTotal:  16 kB", "pswpin 7"."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and is_count(row[1])}


def _from_kib(value: int | None) -> int | None:
    return None if value is None or value * 1024 >= MAX_COUNT else value * 1024


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
