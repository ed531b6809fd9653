"""NVML: what a device tells is taken in base units, what it does not tell is None."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pacekeeper.agent.nvml import NoNvml, Nvml, open_nvml


class FakeError(Exception):
    """What the fake driver raises."""


ANSWERS: dict[str, Any] = {
    "nvmlDeviceGetUUID": "GPU-1",
    "nvmlDeviceGetName": b"H200",
    "nvmlDeviceGetClockInfo": 1500,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetPowerUsage": 350_000,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=80),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=5),
    "nvmlDeviceGetCurrentClocksThrottleReasons": 4,
    "nvmlDeviceGetCurrPcieLinkGeneration": 5,
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
    "nvmlDeviceGetPcieReplayCounter": 0,
    "nvmlDeviceGetTotalEccErrors": 2,
    "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=77)],
}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A fake NVML whose answers the test may change; an exception is raised."""
    answers = dict(ANSWERS)
    fake: Any = ModuleType("pynvml")
    fake.NVMLError = FakeError
    for name in ("NVML_CLOCK_SM", "NVML_CLOCK_MEM", "NVML_TEMPERATURE_GPU"):
        setattr(fake, name, 0)
    fake.NVML_MEMORY_ERROR_TYPE_UNCORRECTED = fake.NVML_VOLATILE_ECC = 1
    fake.nvmlInit = fake.nvmlShutdown = lambda: None
    fake.nvmlDeviceGetCount = lambda: 1
    fake.nvmlDeviceGetHandleByIndex = lambda index: index

    def answer(name: str) -> Any:
        def call(*_: Any) -> Any:
            if isinstance(answers[name], Exception):
                raise answers[name]
            return answers[name]

        return call

    for name in ANSWERS:
        setattr(fake, name, answer(name))
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return answers


def opened() -> Nvml:
    nvml = open_nvml()
    assert isinstance(nvml, Nvml)
    return nvml


def test_a_reading_is_in_base_units(driver: dict[str, Any]) -> None:
    (sample,) = opened().sample(3.0)
    assert (sample.device_uuid, sample.name, sample.sampled_s) == ("GPU-1", "H200", 3.0)
    assert (sample.power_watts, sample.power_limit_watts) == (350.0, 700.0)
    assert (sample.utilisation_ratio, sample.processes) == (0.8, (77,))


def test_what_a_device_refuses_to_tell_is_none(driver: dict[str, Any]) -> None:
    driver["nvmlDeviceGetPowerUsage"] = FakeError("not supported")
    driver["nvmlDeviceGetComputeRunningProcesses"] = FakeError("not supported")
    (sample,) = opened().sample(3.0)
    assert sample.power_watts is None
    assert sample.processes is None
    assert sample.temperature_celsius == 61


def test_a_lost_gpu_is_said_to_be_lost(driver: dict[str, Any]) -> None:
    nvml = opened()
    driver["nvmlDeviceGetUUID"] = FakeError("GPU is lost")
    assert nvml.sample(3.0) == ()
    assert nvml.lost == ["device 0 does not answer"]


def test_no_driver_is_a_reason_not_a_failure(
    driver: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise FakeError("library not found")

    monkeypatch.setattr(sys.modules["pynvml"], "nvmlInit", refuse)
    found = open_nvml()
    assert isinstance(found, NoNvml)
    assert "library not found" in found.reason


def test_no_package_is_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = open_nvml()
    assert isinstance(found, NoNvml)
    assert "not installed" in found.reason
