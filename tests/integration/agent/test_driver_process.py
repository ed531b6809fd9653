"""The agent as a process of its own over a driver on paper: what happens to a device is told."""

from pathlib import Path

import pytest

from pacekeeper.core.telemetry.samples import DeviceSample
from support import fake_nvml
from support.agents import Node, PaperController, play, until
from support.fake_nvml import Driver

LOST = 15

if fake_nvml.compiler() is None:
    pytest.skip("needs a C compiler (gcc or cc)", allow_module_level=True)


def test_what_happens_to_a_device_reaches_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(tmp_path / "state", num_devices=8)
    library = fake_nvml.build(tmp_path)
    for name, value in fake_nvml.environment(library, driver).items():
        monkeypatch.setenv(name, value)

    async def body(controller: PaperController, node: Node) -> None:
        def newest(index: int) -> DeviceSample | None:
            told = [report.devices[index] for report in controller.reports if report.devices]
            return told[-1] if told else None

        def reasons(index: int) -> int | None:
            sample = newest(index)
            return None if sample is None else sample.clock_event_reasons

        def xids(index: int) -> tuple[int, ...] | None:
            sample = newest(index)
            return None if sample is None or sample.health is None else sample.health.xids

        await node.start(sample_interval_s=0.05)
        await until(lambda: reasons(3) == 0, "all is well")
        driver.devices[3].reasons, driver.devices[3].sm_clock = 0x40, 1155
        await until(lambda: reasons(3) == 0x40, "it is throttled")
        driver.devices[5].report_xid(79)
        await until(lambda: xids(5) == (79,), "an Xid")
        driver.devices[5].code = LOST
        await until(lambda: (sample := newest(5)) is not None and sample.is_lost, "it is lost")
        last = controller.reports[-1]
        assert (last.health.num_devices, last.health.nvml) == (7, "device 5 is lost")
        code, said = await node.stop()
        assert code == 0, said

    play(tmp_path, body)
