"""NVML: what a device tells is taken in base units, what it does not tell is None."""

import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pacekeeper.agent.nvml import client as nvml
from pacekeeper.agent.nvml import sampler as sampler_module
from pacekeeper.agent.nvml.client import Nvml, NvmlUnavailable, open_nvml
from pacekeeper.agent.nvml.device import DriverGoneError
from pacekeeper.agent.nvml.sampler import HUNG_S, Sampler
from pacekeeper.core.telemetry.samples import DeviceHealth, DeviceSample

CODES = {
    "GPU_IS_LOST": 15, "RESET_REQUIRED": 16, "NOT_SUPPORTED": 3, "FUNCTION_NOT_FOUND": 13,
    "UNINITIALIZED": 1, "DRIVER_NOT_LOADED": 9, "LIB_RM_VERSION_MISMATCH": 18, "TIMEOUT": 10,
}  # fmt: skip
LOST, NOT_SUPPORTED, NOT_FOUND, UNKNOWN = 15, 3, 13, 999


class FakeError(Exception):
    """What the fake driver raises; `value` is NVML's return code."""

    def __init__(self, value: int) -> None:
        super().__init__(f"code {value}")
        self.value = value


ANSWERS: dict[str, Any] = {
    "nvmlDeviceGetUUID": "GPU-1",
    "nvmlDeviceGetName": b"H200",
    "nvmlDeviceGetClockInfo": 1500,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetPowerUsage": 350_000,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetTotalEnergyConsumption": 2_000_000,
    "nvmlDeviceGetApplicationsClock": 1830,
    "nvmlDeviceGetMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetRowRemapperHistogram": SimpleNamespace(none=3),
    "nvmlDeviceGetMigMode": [0, 0],
    "nvmlDeviceGetNvLinkState": FakeError(NOT_SUPPORTED),
    "nvmlDeviceGetFieldValues": FakeError(NOT_SUPPORTED),
    "nvmlDeviceGetMarginTemperature": 31,
    "nvmlGpmQueryDeviceSupport": FakeError(NOT_SUPPORTED),
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=80),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=5),
    "nvmlDeviceGetCurrentClocksEventReasons": 4,
    "nvmlDeviceGetCurrentClocksThrottleReasons": FakeError(NOT_FOUND),
    "nvmlDeviceGetCurrPcieLinkGeneration": 5,
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
    "nvmlDeviceGetPcieReplayCounter": 0,
    "nvmlDeviceGetTotalEccErrors": 2,
    "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=77)],
}


class Driver:
    """A fake NVML. A test changes `answers`; an exception is raised, a dict is by device."""

    def __init__(self) -> None:
        self.answers = dict(ANSWERS)
        self.asked: list[str] = []
        self.num_devices = 1
        self.sick_handles: set[int] = set()
        self.answers["nvmlEventSetCreate"] = FakeError(NOT_SUPPORTED)

    def module(self) -> Any:
        fake: Any = ModuleType("pynvml")
        fake.NVMLError = FakeError
        for name in ("NVML_CLOCK_SM", "NVML_CLOCK_MEM", "NVML_TEMPERATURE_GPU"):
            setattr(fake, name, 0)
        fake.NVML_MEMORY_ERROR_TYPE_UNCORRECTED = fake.NVML_VOLATILE_ECC = 1
        for name, code in CODES.items():
            setattr(fake, f"NVML_ERROR_{name}", code)
        fake.nvmlEventSetCreate = self._answer("nvmlEventSetCreate")
        fake.nvmlInit = fake.nvmlShutdown = lambda: None
        fake.nvmlDeviceGetCount = lambda: self.num_devices
        fake.nvmlDeviceGetHandleByIndex = self._handle
        for name in ANSWERS:
            setattr(fake, name, self._answer(name))
        return fake

    def _handle(self, index: int) -> int:
        if index in self.sick_handles:
            raise FakeError(UNKNOWN)
        return index

    def _answer(self, name: str) -> Any:
        def call(handle: int = 0, *_: Any) -> Any:
            self.asked.append(name)
            answer = self.answers[name]
            if isinstance(answer, dict):
                answer = answer[handle]
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", made.module())
    return made


def sampled(nvml: Nvml, now_s: float) -> DeviceSample:
    """The only device; how long it took is of this machine."""
    (sample,) = nvml.sample(now_s)
    assert sample.answer_s is None or sample.answer_s >= 0.0
    return replace(sample, answer_s=None)


def opened() -> Nvml:
    found = open_nvml()
    assert isinstance(found, Nvml)
    return found


def test_a_reading_is_in_base_units(driver: Driver) -> None:
    assert sampled(opened(), 3.0) == DeviceSample(
        device_index=0,
        device_uuid="GPU-1",
        sampled_s=3.0,
        name="H200",
        sm_clock_mhz=1500,
        sm_clock_max_mhz=1980,
        memory_clock_mhz=1500,
        temperature_celsius=61,
        power_watts=350.0,
        power_limit_watts=700.0,
        utilisation_ratio=0.8,
        memory_used_bytes=5,
        clock_event_reasons=4,
        pcie_generation=5,
        pcie_width=16,
        pcie_replays=0,
        ecc_uncorrected=2,
        processes=(77,),
        energy_joules=2000.0,
        margin_celsius=31,
        health=DeviceHealth(
            memory_clock_max_mhz=1980,
            sm_clock_set_mhz=1830,
            pcie_generation_max=5,
            pcie_width_max=16,
            remap_banks_full=3,
        ),
    )


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NOT_FOUND, UNKNOWN])
def test_what_a_device_refuses_to_tell_is_none(driver: Driver, code: int) -> None:
    for name in ANSWERS:
        if name != "nvmlDeviceGetUUID":
            driver.answers[name] = FakeError(code)
    sample = sampled(opened(), 3.0)
    bare = DeviceSample(device_index=0, device_uuid="GPU-1", sampled_s=3.0)
    assert sample == replace(bare, health=DeviceHealth())


def test_what_is_not_supported_is_not_asked_again_what_failed_once_is(driver: Driver) -> None:
    driver.answers["nvmlDeviceGetPowerUsage"] = FakeError(NOT_SUPPORTED)
    driver.answers["nvmlDeviceGetTemperature"] = FakeError(UNKNOWN)
    found = opened()
    found.sample(0.0)
    driver.answers["nvmlDeviceGetTemperature"] = 40
    (sample,) = found.sample(1.0)
    assert driver.asked.count("nvmlDeviceGetPowerUsage") == 1
    assert sample.temperature_celsius == 40


def test_an_older_driver_tells_its_reasons_under_the_older_name(driver: Driver) -> None:
    driver.answers["nvmlDeviceGetCurrentClocksEventReasons"] = FakeError(NOT_FOUND)
    driver.answers["nvmlDeviceGetCurrentClocksThrottleReasons"] = 0x60
    (sample,) = opened().sample(3.0)
    assert sample.clock_event_reasons == 0x60


def test_costly_questions_are_asked_seldom_and_their_answers_kept(driver: Driver) -> None:
    found = opened()
    for now_s in (0.0, 1.0, nvml.SLOW_INTERVAL_S - 0.1):
        (sample,) = found.sample(now_s)
        assert sample.processes == (77,)
    assert driver.asked.count("nvmlDeviceGetComputeRunningProcesses") == 1
    assert driver.asked.count("nvmlDeviceGetPowerUsage") == 3
    driver.answers["nvmlDeviceGetComputeRunningProcesses"] = []
    (sample,) = found.sample(nvml.SLOW_INTERVAL_S)
    assert sample.processes == ()


def answering(nvml: Nvml, now_s: float) -> list[int]:
    return [sample.device_index for sample in nvml.sample(now_s) if not sample.is_lost]


@pytest.mark.parametrize("name", ["nvmlDeviceGetUUID", "nvmlDeviceGetTemperature"])
def test_a_lost_device_is_said_to_be_lost_and_left_alone(driver: Driver, name: str) -> None:
    driver.num_devices = 2
    driver.answers["nvmlDeviceGetUUID"] = {0: "GPU-0", 1: "GPU-1"}
    driver.answers[name] = {0: FakeError(LOST), 1: ANSWERS[name]}
    found = opened()
    assert answering(found, 3.0) == [1]
    assert found.lost == ("device 0 is lost",)
    driver.answers[name] = ANSWERS[name]
    assert answering(found, 4.0) == [1], "until it is opened anew"
    driver.answers["nvmlDeviceGetUUID"] = {0: "GPU-0", 1: "GPU-1"}
    assert len(opened().sample(5.0)) == 2


def test_a_device_that_was_there_is_told_of_as_lost_by_its_name(driver: Driver) -> None:
    found = opened()
    found.sample(3.0)
    driver.answers["nvmlDeviceGetTemperature"] = FakeError(LOST)
    lost = DeviceSample(
        device_index=0, device_uuid="GPU-1", sampled_s=4.0, name="H200", is_lost=True
    )
    assert sampled(found, 4.0) == replace(lost, health=DeviceHealth())


@pytest.mark.parametrize("code", [1, 9, 18])
def test_a_driver_that_is_gone_is_no_lost_device(driver: Driver, code: int) -> None:
    found = opened()
    driver.answers["nvmlDeviceGetTemperature"] = FakeError(code)
    with pytest.raises(DriverGoneError):
        found.sample(3.0)


def test_a_binding_from_before_a_question_tells_all_else(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys.modules["pynvml"], "nvmlDeviceGetMarginTemperature")
    sample = sampled(opened(), 3.0)
    assert (sample.margin_celsius, sample.temperature_celsius) == (None, 61)


def test_devices_are_asked_their_costly_questions_one_after_the_other(driver: Driver) -> None:
    driver.num_devices = 4
    found = opened()
    found.sample(0.0)
    costly = "nvmlDeviceGetComputeRunningProcesses"
    first, most = driver.asked.count(costly), 0
    assert first == 4
    for second in range(1, 120):
        before = driver.asked.count(costly)
        found.sample(float(second))
        most = max(most, driver.asked.count(costly) - before)
    assert most == 1


def test_a_device_that_can_not_be_opened_hides_no_other(driver: Driver) -> None:
    driver.num_devices, driver.sick_handles = 3, {1}
    found = opened()
    assert [sample.device_index for sample in found.sample(3.0)] == [0, 2]
    assert found.lost == ("device 1 is lost",)


def test_no_driver_is_a_reason_not_a_failure(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise FakeError(12)

    monkeypatch.setattr(sys.modules["pynvml"], "nvmlInit", refuse)
    found = open_nvml()
    assert isinstance(found, NvmlUnavailable)
    assert "code 12" in found.reason


def test_no_package_is_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = open_nvml()
    assert isinstance(found, NvmlUnavailable)
    assert "not installed" in found.reason


def test_the_real_library_knows_every_name_we_ask() -> None:
    import pynvml

    for name in (*ANSWERS, "NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_UNINITIALIZED"):
        assert hasattr(pynvml, name), name


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def wait_for_state(sampler: Sampler, state: str, now_s: float = 0.0) -> None:
    waiter = threading.Event()
    for _ in range(1000):
        if sampler.latest(now_s)[1] == state:
            return
        waiter.wait(0.01)
    raise AssertionError(f"never {state!r}, but {sampler.latest(now_s)}")


def test_samples_come_from_a_thread_of_their_own(driver: Driver) -> None:
    sampler = Sampler(0.01)
    assert sampler.latest(0.0)[0] == ()
    sampler.start()
    wait_for_state(sampler, "ok")
    assert [sample.device_uuid for sample in sampler.latest(0.0)[0]] == ["GPU-1"]
    driver.answers["nvmlDeviceGetUUID"] = FakeError(LOST)
    wait_for_state(sampler, "device 0 is lost")
    assert [sample.is_lost for sample in sampler.latest(0.0)[0]] == [True]
    sampler.stop()


def test_a_driver_that_hangs_is_said_to_hang_and_stops_nobody(gate: threading.Event) -> None:
    def hang(_: object) -> NvmlUnavailable:
        gate.wait()
        return NvmlUnavailable(reason="late")

    sampler = Sampler(0.01, opener=hang)
    sampler.start()
    wait_for_state(sampler, f"NVML hangs: no answer for more than {HUNG_S:g} s", 1e12)
    # The thread of the test before may not be gone yet: it is one of the same kind.
    are_daemons = {thread.daemon for thread in threading.enumerate() if thread.name == "nvml"}
    assert are_daemons == {True}, "the agent's end does not wait for it"
    sampler.stop()


def test_what_fails_unforeseen_is_said_and_tried_again(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a binding of another age may fail: the thread that reads does not end of it."""
    monkeypatch.setattr(sampler_module, "RETRY_S", 0.01)
    watched = Sampler(0.01)
    watched.start()
    wait_for_state(watched, "ok")
    well = driver.answers["nvmlDeviceGetUUID"]
    driver.answers["nvmlDeviceGetUUID"] = TypeError("torn")
    wait_for_state(watched, "reading NVML failed: TypeError('torn')")
    assert watched.latest(0.0)[0] == ()
    driver.answers["nvmlDeviceGetUUID"] = well
    wait_for_state(watched, "ok")
    watched.stop()
