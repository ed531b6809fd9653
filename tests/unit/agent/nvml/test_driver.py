"""The real `nvidia-ml-py` over a driver on paper: faults come while somebody reads it."""

import ctypes
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pacekeeper.agent.nvml import sampler, xid_events
from pacekeeper.agent.nvml.client import FIELDS_INTERVAL_S, Nvml, NvmlUnavailable, open_nvml
from pacekeeper.agent.nvml.device import DriverGoneError
from pacekeeper.agent.nvml.sampler import Sampler
from pacekeeper.cli.doctor.checks import Health
from pacekeeper.cli.doctor.machine_checks import check_nvml
from pacekeeper.core.telemetry.samples import DeviceSample
from support import fake_nvml
from support.fake_nvml import NOT_TOLD, Driver

pynvml = pytest.importorskip("pynvml")
LOST, GONE, NOT_LOADED = 15, 1, 9
PATIENCE_S = 60.0  # for a broken world only

if fake_nvml.compiler() is None:
    pytest.skip("needs a C compiler (gcc or cc)", allow_module_level=True)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Not by the name of the real one: other tests of this process look for that.
    return fake_nvml.build(tmp_path_factory.mktemp("nvml"), soname="nvml-on-paper.so")


@pytest.fixture
def driver(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Eight devices; the binding calls a library of this test's own."""
    own = Path(shutil.copy(library, tmp_path))
    made = Driver(tmp_path / "state", num_devices=8)
    monkeypatch.setenv(fake_nvml.VARIABLE, str(made.path))
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(own)))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(xid_events, "WAIT_MS", 20)
    return made


@pytest.fixture
def nvml(driver: Driver) -> Iterator[Nvml]:
    found = open_nvml()
    assert isinstance(found, Nvml)
    yield found
    found.close()


def until(what: str, holds: Callable[[], object]) -> None:
    waiter = threading.Event()
    for _ in range(int(PATIENCE_S / 0.01)):
        if holds():
            return
        waiter.wait(0.01)
    raise AssertionError(f"never: {what}")


def test_a_device_tells_all_that_the_table_asks(nvml: Nvml) -> None:
    nvml.sample(0.0)
    sample = nvml.sample(2 * FIELDS_INTERVAL_S)[3]
    told = {name: getattr(sample, name) for name in DeviceSample.__slots__}
    assert [name for name, value in told.items() if value is None] == []
    assert sample.health is not None
    untold = [n for n in sample.health.__slots__ if getattr(sample.health, n) is None]
    assert untold == []
    assert (sample.device_uuid, sample.processes, sample.name) == (
        "GPU-3",
        (1003,),
        "NVIDIA H100 80GB HBM3",
    )
    assert (sample.power_watts, sample.power_now_watts, sample.energy_joules) == (600, 610, 1000)
    assert (sample.memory_temperature_celsius, sample.margin_celsius) == (62, 32)
    assert (sample.sm_active_ratio, sample.tensor_active_ratio) == (0.8, 0.4)
    assert (sample.nvlink_sent_bytes, sample.pcie_sent_bytes) == (1 << 40, 1 << 20)
    health = sample.health
    assert (health.nvlinks, health.nvlinks_up) == (18, 18)
    assert (health.power_limit_default_watts, health.sm_clock_set_mhz) == (700.0, 1980)
    assert (health.num_xids, health.xids, health.recovery_action) == (0, (), 0)


def test_a_throttle_between_two_readings_is_in_the_counter(driver: Driver, nvml: Nvml) -> None:
    before = nvml.sample(0.0)[2].hw_thermal_held_s
    driver.devices[2].tell(252, 1_200_000_000)
    for second in (FIELDS_INTERVAL_S, 2 * FIELDS_INTERVAL_S):
        after = nvml.sample(second)[2]
    assert (before, after.clock_event_reasons) == (0.0, 0)
    assert after.hw_thermal_held_s == pytest.approx(1.2)


UNSUPPORTED = [
    ("power_mw", "power_watts"),
    ("margin", "margin_celsius"),
    ("reasons", "clock_event_reasons"),
    ("num_pids", "processes"),
    ("sm_active_percent", "sm_active_ratio"),
    ("utilisation", "utilisation_ratio"),
    ("energy_mj", "energy_joules"),
]


@pytest.mark.parametrize(("question", "field"), UNSUPPORTED)
def test_what_one_device_does_not_support_is_not_told_of_it_alone(
    driver: Driver, nvml: Nvml, question: str, field: str
) -> None:
    setattr(driver.devices[1], question, NOT_TOLD)
    nvml.sample(0.0)
    samples = nvml.sample(2 * FIELDS_INTERVAL_S)
    told = [getattr(sample, field) is not None for sample in samples]
    assert told == [index != 1 for index in range(8)]


def test_a_device_of_few_answers_is_asked_less(driver: Driver, nvml: Nvml) -> None:
    """As in a guest with a virtual GPU: most questions are not supported."""
    for name in fake_nvml.HEALTHY:
        setattr(driver.devices[0], name, NOT_TOLD)
    driver.devices[0].num_fields = driver.devices[0].num_links = 0
    driver.devices[0].num_instances = 0
    nvml.sample(0.0)
    before = driver.num_calls
    nvml.sample(1.0)
    all_asked = driver.num_calls - before
    assert nvml.sample(2.0)[0].device_uuid == "GPU-0"
    questions_of_one_that_tells = (all_asked - 1) / 7
    assert questions_of_one_that_tells > 8, "of the silent one only its name is asked"


def test_xids_are_told_each_once_and_of_their_device(driver: Driver, nvml: Nvml) -> None:
    for xid in (63, 94, 74):
        driver.devices[5].report_xid(xid)
    until("all were heard", lambda: of(nvml, 5) == (3, (63, 94, 74)))
    assert of(nvml, 4) == (0, ())


def of(nvml: Nvml, index: int) -> tuple[int | None, tuple[int, ...] | None]:
    health = nvml.sample(1.0)[index].health
    assert health is not None
    return health.num_xids, health.xids


def test_of_many_xids_the_newest_are_kept_and_all_are_counted(driver: Driver, nvml: Nvml) -> None:
    for xid in range(20):
        driver.devices[0].report_xid(xid)
    until("all were heard", lambda: of(nvml, 0)[0] == 20)
    assert of(nvml, 0)[1] == tuple(range(12, 20))


def test_a_device_that_can_not_be_listened_to_is_not_said_to_be_quiet(driver: Driver) -> None:
    driver.devices[1].num_xids = NOT_TOLD
    found = open_nvml()
    assert isinstance(found, Nvml)
    assert (of(found, 1), of(found, 2)) == ((None, None), (0, ()))
    found.close()


def test_while_the_driver_is_gone_nobody_is_said_to_be_quiet(driver: Driver, nvml: Nvml) -> None:
    watch = nvml.watch
    assert watch is not None and watch.of(0) is not None
    driver.restart()
    until("it is deaf", lambda: watch.of(0) is None)


def test_a_device_falls_off_its_bus_and_its_last_words_are_kept(driver: Driver, nvml: Nvml) -> None:
    nvml.sample(0.0)
    driver.devices[6].report_xid(79)
    until("it was heard", lambda: of(nvml, 6)[0] == 1)
    driver.devices[6].code = LOST
    samples = nvml.sample(1.0)
    assert [sample.is_lost for sample in samples] == [index == 6 for index in range(8)]
    assert nvml.lost == ("device 6 is lost",)
    assert samples[6].health is not None and samples[6].health.xids == (79,)
    driver.devices[6].code = 0
    assert nvml.sample(2.0)[6].is_lost, "it is left alone until the driver is opened anew"


def test_mig_instances_are_devices_of_their_own(driver: Driver, nvml: Nvml) -> None:
    for index in range(8):
        driver.devices[index].num_instances = 8
        driver.devices[index].sm_clock = 1500 + index
    samples = nvml.sample(0.0)
    assert len({sample.device_uuid for sample in samples}) == len(samples) == 64
    one = samples[3 * 8 + 2]
    assert (one.device_uuid, one.parent_uuid) == ("GPU-3 MIG 2", "GPU-3")
    assert (one.memory_used_bytes, one.sm_clock_mhz, one.device_index) == (1002, 1503, 3)
    assert (one.utilisation_ratio, one.processes) == (None, None)


def test_links_that_go_down_are_seen(driver: Driver, nvml: Nvml) -> None:
    nvml.sample(0.0)
    for link in (3, 4):
        driver.devices[0].tell(165, 0, scope=link, kind=fake_nvml.UINT)
    driver.devices[0].tell(163, 7, scope=9)
    health = nvml.sample(FIELDS_INTERVAL_S)[0].health
    assert health is not None
    assert (health.nvlinks, health.nvlinks_up, health.nvlink_errors) == (18, 16, 7)
    assert health.nvlink_bytes_per_s == pytest.approx(16 * 26_562e6)


def test_a_driver_that_restarts_is_opened_anew_with_its_xids_kept(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "RETRY_S", 0.05)
    watched = Sampler(0.01)
    watched.start()
    until("it answers", lambda: watched.latest(0.0)[1] == "ok")
    driver.devices[0].report_xid(63)

    def xids() -> tuple[int, ...] | None:
        samples, _ = watched.latest(0.0)
        return samples[0].health.xids if samples and samples[0].health else None

    until("the Xid was heard", lambda: xids() == (63,))
    driver.refuse(NOT_LOADED)
    driver.restart()
    until("it is gone", lambda: watched.latest(0.0)[1].startswith("no NVML"))
    assert watched.latest(0.0)[0] == ()
    driver.refuse(0)
    until("it is back", lambda: watched.latest(0.0)[1] == "ok")
    assert xids() == (63,)
    driver.devices[0].report_xid(64)
    until("it is listened to again", lambda: xids() == (63, 64))
    watched.stop()


def test_a_call_that_hangs_is_said_to_hang_and_nobody_waits_for_it(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "HUNG_S", 0.1)
    watched = Sampler(0.01)
    watched.start()
    until("it answers", lambda: watched.rounds > 1)
    driver.devices[7].delay_us = 400_000
    until("it hangs", lambda: hangs(watched))
    driver.devices[7].delay_us = 0
    watched.stop()


def hangs(watched: Sampler) -> bool:
    import time

    samples, state = watched.latest(time.monotonic())
    return samples == () and state.startswith("NVML hangs")


def test_slow_answers_are_told_and_asked_for_less(driver: Driver, nvml: Nvml) -> None:
    driver.devices[2].delay_us = 2_000
    samples = nvml.sample(0.0)
    answers = [sample.answer_s or 0.0 for sample in samples]
    assert answers[2] == max(answers) >= 0.002


def test_a_doctor_says_what_answers_and_what_does_not(driver: Driver) -> None:
    assert (check_nvml().health, check_nvml().found) == (Health.OK, "8 devices")
    driver.devices[6].code = LOST
    check = check_nvml()
    assert (check.health, check.found) == (Health.LIMITED, "7 devices; device 6 is lost")
    assert "healthcheck" in check.remedy


def test_a_doctor_bears_a_driver_that_goes_while_it_looks(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go(*_: object) -> None:
        raise DriverGoneError("Uninitialized")

    monkeypatch.setattr(Nvml, "sample", go)
    assert "Uninitialized" in check_nvml().found


def test_a_library_without_a_driver_is_a_reason(driver: Driver) -> None:
    driver.refuse(NOT_LOADED)
    found = open_nvml()
    assert isinstance(found, NvmlUnavailable) and "no NVML" in found.reason
