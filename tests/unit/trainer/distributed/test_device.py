"""Which clock and which device a rank gets, and what is said of it."""

import logging
from pathlib import Path

import pytest
import torch

from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import HostError
from pacekeeper.trainer.distributed import device
from pacekeeper.trainer.distributed.device import (
    choose_clock,
    device_number,
    say_clock,
)
from pacekeeper.trainer.elastic import launcher
from pacekeeper.trainer.elastic.launch_spec import NodeSpec
from pacekeeper.trainer.elastic.launcher import Supervisor, supervise
from pacekeeper.trainer.elastic.loop import rank_main
from pacekeeper.trainer.elastic.rendezvous import RendezvousResult


@pytest.mark.parametrize(
    ("wanted", "devices", "clock"),
    [
        ("auto", 0, "cpu"),
        ("auto", 1, "device"),
        ("device", 2, "device"),
        ("cpu", 8, "cpu"),
        ("emulated", 8, "emulated"),
    ],
)
def test_the_clock_is_the_one_asked_for_or_the_best_there_is(
    wanted: str, devices: int, clock: str
) -> None:
    assert choose_clock(wanted, devices, "cpu") == clock


def test_a_device_asked_for_is_never_replaced_by_anything_else() -> None:
    with pytest.raises(HostError, match="torch sees no CUDA device here; choose --clock"):
        choose_clock("device", 0)


@pytest.mark.parametrize(
    ("clock", "wanted", "said"),
    [
        ("emulated", "auto", "clock=emulated, chosen by itself: modelled device times, not"),
        ("device", "auto", "clock=device, chosen by itself: CUDA events, 2 ranks on 2 devices"),
        ("cpu", "cpu", "clock=cpu: thread CPU time"),
    ],
)
def test_what_was_chosen_is_said(
    clock: str, wanted: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    say_clock(clock, wanted, 2, 2)
    (record,) = caplog.records
    assert record.getMessage().startswith(said)


def test_ranks_that_share_a_device_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    say_clock("device", "device", 1, 2)
    assert "ranks share a device" in caplog.text
    caplog.clear()
    say_clock("device", "device", 2, 2)
    assert not caplog.records


def test_the_ranks_of_a_node_take_its_devices_in_turn() -> None:
    node_of = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1}
    assert [device_number(rank, node_of, 2) for rank in node_of] == [0, 1, 0, 0, 1]


def test_the_cpu_has_no_uuid() -> None:
    assert device.device_uuid(torch.device("cpu")) == ""


class Halted(Exception):
    """Far enough."""


@pytest.mark.parametrize(
    ("own", "of_node_0", "devices", "expected"),
    [("auto", "cpu", 4, "cpu"), ("auto", "device", 4, "device"), ("cpu", "x", 0, "cpu")],
)
def test_nodes_that_choose_by_themselves_follow_node_0(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: str,
    of_node_0: str,
    devices: int,
    expected: str,
) -> None:
    used: list[str] = []

    def halted(self: Supervisor) -> None:
        used.append(self.spec.config.wanted_clock)
        raise Halted

    meeting = RendezvousResult(addresses=(), run_id=1, clock=of_node_0)
    monkeypatch.setattr(launcher, "meet", lambda *_, **__: meeting)
    monkeypatch.setattr(launcher, "num_devices", lambda: devices)
    monkeypatch.setattr(Supervisor, "start", halted)
    with pytest.raises(Halted):
        supervise(spec(tmp_path, own), rank_main)
    assert used == [expected]


def test_a_node_without_device_does_not_join_a_job_of_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = RendezvousResult(addresses=(), run_id=1, clock="device")
    monkeypatch.setattr(launcher, "meet", lambda *_, **__: meeting)
    monkeypatch.setattr(launcher, "num_devices", lambda: 0)
    with pytest.raises(HostError, match="no CUDA device here"):
        supervise(spec(tmp_path, "auto"), rank_main)


def spec(directory: Path, wanted: str) -> NodeSpec:
    return NodeSpec(
        config=EngineConfig(job="test", device=wanted),
        node_rank=1,
        num_nodes=2,
        ranks_per_node=2,
        rendezvous="127.0.0.1:29400",
        ring_dir=str(directory / "rings"),
        run_dir=str(directory / "run"),
    )
