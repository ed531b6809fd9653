"""What the agent's own reader of NVML says of the device, idle and busy."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch

from benchmarks.gpu.common import NotRun, Scale, figure, synchronize
from pacekeeper.agent.nvml.client import FIELDS_INTERVAL_S, SLOW_INTERVAL_S, Nvml, open_nvml
from pacekeeper.core.telemetry.samples import DeviceHealth, DeviceSample
from pacekeeper.predictor.causes.clocks import REASONS

_IDENTITY = ("device_index", "device_uuid", "sampled_s", "is_lost", "health", "parent_uuid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A sample, in part."""

    when: str = figure("when")
    sm_clock_mhz: float | None = figure("SM clock, MHz")
    power_watts: float | None = figure("power, W")
    temperature_celsius: float | None = figure("temperature, C")
    utilisation_ratio: float | None = figure("utilisation")
    sm_active_ratio: float | None = figure("SM active")
    tensor_active_ratio: float | None = figure("tensor cores active")
    reasons: str = figure("clock event reasons")
    answer_ms: float | None = figure("answered in, ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Figures of `read_device`."""

    devices: int = figure("devices that NVML lists")
    name: str = figure("name")
    moments: tuple[Moment, ...] = figure("samples of this device")
    num_fields: int = figure("fields of a sample that the device reports")
    missing: str = figure("fields that it does not report")
    num_health_fields: int = figure("fields of its health that it reports")
    missing_health: str = figure("fields of its health that it does not report")
    held: str = figure("seconds in which clocks were held down while busy, by reason")
    processes: int | None = figure("processes on the device, as far as they are visible here")
    refused: str = figure("queries that device, driver or binding do not support")


def read_device(device: torch.device, scale: Scale) -> Readings:
    """Sample the device idle, then several times while it multiplies matrices."""
    nvml = open_nvml()
    if not isinstance(nvml, Nvml):
        raise NotRun(nvml.reason)
    try:
        return _read(nvml, device, scale)
    finally:
        nvml.close()


def _read(nvml: Nvml, device: torch.device, scale: Scale) -> Readings:
    index = own_index(nvml.sample(time.monotonic()), device)
    samples = [("idle", nvml.sample(time.monotonic())[index])]
    for number, _ in enumerate(_busy(device, scale)):
        # As if so much time had passed: all queries are due again.
        now_s = time.monotonic() + (number + 1) * (SLOW_INTERVAL_S + FIELDS_INTERVAL_S)
        samples.append((f"busy {number + 1}", nvml.sample(now_s)[index]))
    first, last = samples[0][1], samples[-1][1]
    health = last.health or DeviceHealth()
    return Readings(
        devices=len(nvml.devices),
        name=last.name,
        moments=tuple(_moment(when, sample) for when, sample in samples),
        num_fields=len(_names(last, is_known=True)),
        missing=", ".join(_names(last, is_known=False)) or "none",
        num_health_fields=len(_names(health, is_known=True)),
        missing_health=", ".join(_names(health, is_known=False)) or "none",
        held=_held(first, last),
        processes=None if last.processes is None else len(last.processes),
        refused=", ".join(sorted(nvml.devices[last.device_index].refused)) or "none",
    )


def own_index(samples: Sequence[DeviceSample], device: torch.device) -> int:
    """Return the position of the sample of torch's device; NVML may list more devices."""
    if device.type == "cuda":
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        for index, sample in enumerate(samples):
            if uuid in (sample.device_uuid, sample.parent_uuid):
                return index
        listed = [sample.device_uuid for sample in samples]
        raise NotRun(f"NVML lists {listed}, torch computes on {uuid}")
    return 0


def _busy(device: torch.device, scale: Scale) -> Iterator[None]:
    """Keep the device busy, and come back three times while it is."""
    one = torch.randn(scale.matrix, scale.matrix, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(one)
    for _ in range(3):
        end_s = time.monotonic() + scale.load_s / 3
        while time.monotonic() < end_s:
            for _ in range(10):
                torch.mm(one, one, out=out)
            synchronize(device)
        for _ in range(10):  # still under way when the caller looks
            torch.mm(one, one, out=out)
        yield
    synchronize(device)


def reason_names(mask: int | None) -> str:
    """Return the names of the reasons in NVML's bit mask."""
    if mask is None:
        return "not reported"
    known = {1: "idle"} | {bit: name for bit, _, _, name in REASONS}
    found = [name for bit, name in known.items() if mask & bit]
    rest = mask & ~sum(known)
    return ", ".join([*found, *([hex(rest)] if rest else [])]) or "none"


def _moment(when: str, sample: DeviceSample) -> Moment:
    return Moment(
        when=when,
        sm_clock_mhz=sample.sm_clock_mhz,
        power_watts=sample.power_watts,
        temperature_celsius=sample.temperature_celsius,
        utilisation_ratio=sample.utilisation_ratio,
        sm_active_ratio=sample.sm_active_ratio,
        tensor_active_ratio=sample.tensor_active_ratio,
        reasons=reason_names(sample.clock_event_reasons),
        answer_ms=None if sample.answer_s is None else sample.answer_s * 1e3,
    )


def _names(values: DeviceSample | DeviceHealth, *, is_known: bool) -> list[str]:
    names = [one.name for one in fields(values) if one.name not in _IDENTITY]
    return [name for name in names if (getattr(values, name) is not None) == is_known]


def _held(first: DeviceSample, last: DeviceSample) -> str:
    """Differences of the counters of held time."""
    found = []
    for name in (one.name for one in fields(DeviceSample) if one.name.endswith("_held_s")):
        begin, end = getattr(first, name), getattr(last, name)
        if begin is not None and end is not None:
            found.append(f"{name.removesuffix('_held_s')} {end - begin:.2f}")
    return ", ".join(found) or "not reported"
