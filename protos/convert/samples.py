"""Samples of devices and hosts between plain values and messages; those of a report may wait.

Ten thousand agents tell some millions of readings a minute, and nobody looks at them before a rank
is slow: `UnreadSamples` keeps their bytes until then. Only `reports.py` and its likes import this.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from pacekeeper.core.telemetry.node_report import AgentHealth
from pacekeeper.core.telemetry.samples import DeviceHealth, DeviceSample, HostSample
from pacekeeper.core.text import one_line
from pacekeeper.protos import telemetry_pb2

MAX_REMARKS = 64
_Device, _Host = telemetry_pb2.DeviceSample, telemetry_pb2.HostSample
_LISTS = {"processes": "pids", "xids": "codes"}  # unset and empty are two answers
# The fields that a message has under the same names: to ask for them at each sample would cost.
_SAME_NAMES = {
    kind: tuple(field.name for field in fields(kind) if field.name not in ("sampled_s", "health"))
    for kind in (DeviceSample, DeviceHealth, HostSample)
}


def device_to_message(sample: DeviceSample) -> telemetry_pb2.DeviceSample:
    """What was told of one reading."""
    message = telemetry_pb2.DeviceSample(sampled_mono_s=sample.sampled_s)
    _fill(message, sample)
    if sample.health is not None:
        message.health.SetInParent()
        _fill(message.health, sample.health)
    return message


def device_from_message(message: telemetry_pb2.DeviceSample) -> DeviceSample:
    """The reading in a message."""
    values = _set_fields(message)
    if message.HasField("health"):
        values["health"] = DeviceHealth(**_set_fields(message.health))
    values["device_index"] = message.device_index  # proto3 leaves it out where it is zero
    values["device_uuid"] = one_line(message.device_uuid)
    return DeviceSample(sampled_s=message.sampled_mono_s, **values)


def host_to_message(sample: HostSample) -> telemetry_pb2.HostSample:
    """What was told of one reading."""
    message = telemetry_pb2.HostSample(sampled_mono_s=sample.sampled_s)
    _fill(message, sample)
    return message


def host_from_message(message: telemetry_pb2.HostSample) -> HostSample:
    """The reading in a message."""
    return HostSample(sampled_s=message.sampled_mono_s, **_set_fields(message))


def _fill(message: Any, sample: DeviceSample | DeviceHealth | HostSample) -> None:
    """What was told of a sample; what was not stays unset."""
    for name in _SAME_NAMES[type(sample)]:
        value = getattr(sample, name)
        if value is None:
            continue
        if name in _LISTS:
            part = getattr(message, name)
            part.SetInParent()
            getattr(part, _LISTS[name]).extend(value)
        else:
            setattr(message, name, value)


def _set_fields(message: Any) -> dict[str, Any]:
    """The fields that are set, by name. Its cost is that of what was told, not of what could be."""
    values: dict[str, Any] = {}
    for field, value in message.ListFields():
        name = field.name
        if name in _LISTS:
            values[name] = tuple(getattr(value, _LISTS[name]))
        elif name not in ("sampled_mono_s", "health", "device_uuid"):
            values[name] = one_line(value) if isinstance(value, str) else value
    return values


def health_from_message(message: telemetry_pb2.AgentHealth) -> AgentHealth:
    """What an agent says of itself."""
    return AgentHealth(
        nvml=one_line(message.nvml),
        num_devices=message.num_devices,
        records_read=message.records_read,
        records_lost=message.records_lost,
        records_corrupt=message.records_corrupt,
        batches_dropped=message.batches_dropped,
        unreadable=tuple(map(one_line, message.unreadable[:MAX_REMARKS])),
    )


class _LazyDevices:
    """All devices of one report. The bytes were a whole report once: they can be read."""

    __slots__ = ("_data", "_read", "sampled_s")

    def __init__(self, data: Sequence[bytes], sampled_s: float) -> None:
        self._data, self.sampled_s = data, sampled_s
        self._read: tuple[DeviceSample, ...] | None = None

    def read(self) -> tuple[DeviceSample, ...]:
        """Once: they are looked at again at each step while a cause is searched for."""
        if self._read is None:
            self._read = tuple(device_from_message(_Device.FromString(one)) for one in self._data)
        return self._read


class _LazyHost:
    __slots__ = ("_data", "sampled_s")

    def __init__(self, data: bytes, sampled_s: float) -> None:
        self._data, self.sampled_s = data, sampled_s

    def read(self) -> HostSample:
        return host_from_message(_Host.FromString(self._data))


class UnreadSamples:
    """What one report tells of its node, read when it is asked for: a `core.reports.Unread`."""

    __slots__ = ("_devices", "_health", "_host", "sampled_s")

    def __init__(self, parts: telemetry_pb2.NodeReportParts) -> None:
        self._devices, self._host = tuple(parts.devices), parts.host
        self._health = parts.health
        # Of all it holds: one device whose driver hangs must not date the others.
        self.sampled_s = parts.sent_mono_s

    @property
    def devices(self) -> _LazyDevices | None:
        """None: it tells of none."""
        return _LazyDevices(self._devices, self.sampled_s) if self._devices else None

    @property
    def host(self) -> _LazyHost | None:
        """None: it does not tell of it."""
        return _LazyHost(self._host, self.sampled_s) if self._host else None

    def health(self) -> AgentHealth:
        """What the agent said of itself."""
        return health_from_message(telemetry_pb2.AgentHealth.FromString(self._health))
