"""Converts samples of devices and hosts to messages and back; decoding may be deferred.

10,000 agents send millions of values a minute, and most are never read: `UnreadSamples` keeps the
encoded bytes until a cause is searched for. Imported by `reports.py`.
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
_LISTS = {"processes": "pids", "xids": "codes"}  # unset and empty differ
# Fields with the same name in the message, computed once.
_SAME_NAMES = {
    kind: tuple(field.name for field in fields(kind) if field.name not in ("sampled_s", "health"))
    for kind in (DeviceSample, DeviceHealth, HostSample)
}


def device_to_message(sample: DeviceSample) -> telemetry_pb2.DeviceSample:
    """The message of one sample."""
    message = telemetry_pb2.DeviceSample(sampled_mono_s=sample.sampled_s)
    _fill(message, sample)
    if sample.health is not None:
        message.health.SetInParent()
        _fill(message.health, sample.health)
    return message


def device_from_message(message: telemetry_pb2.DeviceSample) -> DeviceSample:
    """The sample in a message."""
    values = _set_fields(message)
    if message.HasField("health"):
        values["health"] = DeviceHealth(**_set_fields(message.health))
    values["device_index"] = message.device_index  # proto3 omits a zero
    values["device_uuid"] = one_line(message.device_uuid)
    return DeviceSample(sampled_s=message.sampled_mono_s, **values)


def host_to_message(sample: HostSample) -> telemetry_pb2.HostSample:
    """The message of one sample."""
    message = telemetry_pb2.HostSample(sampled_mono_s=sample.sampled_s)
    _fill(message, sample)
    return message


def host_from_message(message: telemetry_pb2.HostSample) -> HostSample:
    """The sample in a message."""
    return HostSample(sampled_s=message.sampled_mono_s, **_set_fields(message))


def _fill(message: Any, sample: DeviceSample | DeviceHealth | HostSample) -> None:
    """Set the fields of a sample that are not None."""
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
    """The set fields by name; the cost depends on the set fields only."""
    values: dict[str, Any] = {}
    for field, value in message.ListFields():
        name = field.name
        if name in _LISTS:
            values[name] = tuple(getattr(value, _LISTS[name]))
        elif name not in ("sampled_mono_s", "health", "device_uuid"):
            values[name] = one_line(value) if isinstance(value, str) else value
    return values


def health_from_message(message: telemetry_pb2.AgentHealth) -> AgentHealth:
    """The state of an agent in a message."""
    values = {field.name: getattr(message, field.name) for field in fields(AgentHealth)}
    remarks = tuple(map(one_line, message.unreadable[:MAX_REMARKS]))
    return AgentHealth(**values | {"nvml": one_line(message.nvml), "unreadable": remarks})


class _LazyDevices:
    """Encoded devices of one report, which was parsed once, so that they decode."""

    __slots__ = ("_data", "_read", "sampled_s")

    def __init__(self, data: Sequence[bytes], sampled_s: float) -> None:
        self._data, self.sampled_s = data, sampled_s
        self._read: tuple[DeviceSample, ...] | None = None

    def read(self) -> tuple[DeviceSample, ...]:
        """Decode at the first call; the search for a cause reads them at each step."""
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
    """Samples and health of one report, decoded on access: implements `node_report.Unread`."""

    __slots__ = ("_devices", "_health", "_host", "sampled_s")

    def __init__(self, parts: telemetry_pb2.NodeReportParts) -> None:
        self._devices, self._host = tuple(parts.devices), parts.host
        self._health = parts.health
        # One time for all: a device with a hanging driver must not make the others look old.
        self.sampled_s = parts.sent_mono_s

    @property
    def devices(self) -> _LazyDevices | None:
        """None if the report has no devices."""
        return _LazyDevices(self._devices, self.sampled_s) if self._devices else None

    @property
    def host(self) -> _LazyHost | None:
        """None if the report has no host sample."""
        return _LazyHost(self._host, self.sampled_s) if self._host else None

    def health(self) -> AgentHealth:
        """The state of the agent."""
        return health_from_message(telemetry_pb2.AgentHealth.FromString(self._health))
