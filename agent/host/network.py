"""Reads the kernel's network counters: Ethernet, TCP, InfiniBand. A shell.

Only hardware interfaces (`/sys/class/net/NAME/device`) are summed: traffic through a bridge would
count twice. In a container without the host's network the counters are those of the container.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ERRORS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
_FABRIC_WORD_BYTES = 4  # unit of port_xmit_data and port_rcv_data
MAX_INTERFACE_NAME = 15  # characters
MAX_DIGITS = 20  # of a 64-bit counter
MAX_COUNT = 1 << 63  # a report holds less
_UP = "4"  # "4: ACTIVE"


@dataclass(slots=True, kw_only=True)
class NetworkCounters:
    """Counters summed over all interfaces and ports. Never blocks, never raises."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    _before: dict[str, int] = field(default_factory=dict)
    _before_s: float = 0.0

    def read(self, now_s: float) -> dict[str, Any]:
        """Fields of a HostSample; rates are since the previous reading, absent at the first."""
        counted = self._interfaces() | self._tcp() | self._ports()
        fields: dict[str, Any] = {
            name: counted[name]
            for name in (
                *("network_errors", "network_drops"),
                *("fabric_ports", "fabric_ports_up", "fabric_errors"),
            )
            if counted.get(name, MAX_COUNT) < MAX_COUNT
        }
        passed_s = now_s - self._before_s
        before, self._before, self._before_s = self._before, counted, now_s
        for kind in ("network_sent", "network_received", "fabric_sent", "fabric_received"):
            grown = _growth(before, counted, kind)
            if grown is not None and passed_s > 0.0:
                fields[f"{kind}_bytes_per_s"] = grown / passed_s
        sent, resent = (_growth(before, counted, name) for name in ("tcp_sent", "tcp_resent"))
        if sent and resent is not None:
            fields["tcp_resent_ratio"] = min(1.0, resent / sent)
        return fields

    def _interfaces(self) -> dict[str, int]:
        """Sums over /proc/net/dev; a line is NAME: bytes packets errs drop ..., both directions."""
        sums: dict[str, int] = {}
        for line in _text(self.proc / "net/dev").splitlines():
            name, separator, rest = line.partition(":")
            values = rest.split()
            if not separator or len(values) < 12 or not all(map(is_count, values)):
                continue
            interface = name.strip()
            if len(interface) > MAX_INTERFACE_NAME or "/" in interface:
                continue
            if not (self.sys / "class/net" / interface / "device").exists():
                continue
            counts = [int(value) for value in values]
            found = {
                "network_received": counts[0],
                "network_sent": counts[8],
                "network_errors": counts[2] + counts[10],
                "network_drops": counts[3] + counts[11],
            }
            sums = {key: sums.get(key, 0) + value for key, value in found.items()}
        return sums

    def _tcp(self) -> dict[str, int]:
        """TCP segments sent and retransmitted, from a line of names and one of values."""
        rows = [
            line.split()[1:]
            for line in _text(self.proc / "net/snmp").splitlines()
            if line.startswith("Tcp:")
        ]
        if len(rows) != 2:
            return {}
        known = dict(zip(*rows, strict=False))
        wanted = {"tcp_sent": "OutSegs", "tcp_resent": "RetransSegs"}
        return {
            name: int(known[key]) for name, key in wanted.items() if is_count(known.get(key, ""))
        }

    def _ports(self) -> dict[str, int]:
        """Sums over all InfiniBand and RoCE ports; empty without any."""
        sums: dict[str, int] = {}
        try:
            ports = sorted((self.sys / "class/infiniband").glob("*/ports/*"))
        except OSError:
            return {}
        for port in ports:
            state = _text(port / "state").partition(":")[0].strip()
            found = {"fabric_ports": 1, "fabric_ports_up": int(state == _UP)}
            counters = port / "counters"
            if counters.is_dir():
                found |= {
                    "fabric_errors": sum(_count(counters / name) for name in _ERRORS),
                    "fabric_sent": _count(counters / "port_xmit_data") * _FABRIC_WORD_BYTES,
                    "fabric_received": _count(counters / "port_rcv_data") * _FABRIC_WORD_BYTES,
                }
            sums |= {key: sums.get(key, 0) + value for key, value in found.items()}
        return sums


def _growth(before: dict[str, int], now: dict[str, int], name: str) -> int | None:
    """Increase of a counter; None unless read twice, 0 after the counter was reset."""
    if name not in before or name not in now:
        return None
    return max(0, now[name] - before[name])


def _count(path: Path) -> int:
    text = _text(path).strip()
    return int(text) if is_count(text) else 0


def is_count(text: str) -> bool:
    """Whether the text is a decimal number of at most 64 bits' length."""
    return text.isdecimal() and len(text) <= MAX_DIGITS


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
