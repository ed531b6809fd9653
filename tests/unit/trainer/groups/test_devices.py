"""Which device a rank gets, and what is logged of it."""

import logging
from pathlib import Path

import pytest
import torch

from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import HostError
from pacekeeper.trainer.elastic import launcher
from pacekeeper.trainer.elastic.launch_spec import NodeSpec
from pacekeeper.trainer.elastic.launcher import Supervisor, supervise
from pacekeeper.trainer.elastic.loop import rank_main
from pacekeeper.trainer.elastic.rendezvous import Session
from pacekeeper.trainer.groups import devices as device
from pacekeeper.trainer.groups.devices import (
    choose_device,
    device_number,
    log_device,
)


@pytest.mark.parametrize(
    ("wanted", "devices", "chosen"),
    [("auto", 0, "cpu"), ("auto", 2, "cuda"), ("cuda", 8, "cuda"), ("cpu", 8, "cpu")],
)
def test_the_device_is_the_one_asked_for_or_the_best_there_is(
    wanted: str, devices: int, chosen: str
) -> None:
    assert choose_device(wanted, devices, ranks_on_node=2) == chosen


def test_a_device_asked_for_is_never_replaced_by_anything_else() -> None:
    with pytest.raises(HostError, match="torch sees no CUDA device here; use --device cpu"):
        choose_device("cuda", 0, ranks_on_node=2)


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_each_rank_needs_a_device_of_its_own(wanted: str) -> None:
    with pytest.raises(HostError, match="3 ranks and 2 CUDA devices on this node"):
        choose_device(wanted, 2, ranks_on_node=3)


def test_what_was_chosen_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_device("cuda", "auto", devices=4, ranks=2)
    log_device("cpu", "cpu", devices=0, ranks=2)
    assert [record.getMessage() for record in caplog.records] == [
        "device=cuda (chosen automatically): 2 ranks on 4 devices",
        "device=cpu: 2 ranks",
    ]


def test_the_ranks_of_a_node_take_its_devices_in_order() -> None:
    node_of = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1}
    assert [device_number(rank, node_of) for rank in node_of] == [0, 1, 2, 0, 1]


def test_the_cpu_has_no_uuid() -> None:
    assert device.device_uuid(torch.device("cpu")) == ""


class Halted(Exception):
    """Far enough."""


@pytest.mark.parametrize(
    ("own", "of_node_0", "devices", "expected"),
    [("auto", "cpu", 4, "cpu"), ("auto", "cuda", 4, "cuda"), ("cpu", "x", 0, "cpu")],
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
        used.append(self.spec.config.device)
        raise Halted

    meeting = Session(places=(), run_id=1, device=of_node_0)
    monkeypatch.setattr(launcher, "meet", lambda *_, **__: meeting)
    monkeypatch.setattr(launcher, "num_devices", lambda: devices)
    monkeypatch.setattr(launcher, "make_former", lambda device: None)  # of a newer torch
    monkeypatch.setattr(Supervisor, "start", halted)
    with pytest.raises(Halted):
        supervise(spec(tmp_path, own), rank_main)
    assert used == [expected]


def test_a_node_without_device_does_not_join_a_job_of_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = Session(places=(), run_id=1, device="cuda")
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
