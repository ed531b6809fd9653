"""The five lines in PyTorch: its clock, its waits, and layers that are computed again."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.utils.checkpoint import checkpoint

from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.attachment import Attachment, Clock
from pacekeeper.core.telemetry.records import MicroBatchRecord
from pacekeeper.trainer.adapters import pytorch
from pacekeeper.trainer.adapters.instrumentation.collectives import WaitAwareClock
from pacekeeper.trainer.hooks.compute_timers import ComputeTime
from pacekeeper.trainer.hooks.ring_writer import Ring
from support.process_groups import lone_group
from support.rings import records_in


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process, in which nobody listens yet."""
    with lone_group():
        yield


class Written:
    """A clock that writes down what it is told, and tells late."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def begin(self) -> None:
        self.heard.append("begin")

    def pause(self) -> None:
        self.heard.append("pause")

    def resume(self) -> None:
        self.heard.append("resume")

    def end(self) -> ComputeTime | None:
        self.heard.append("end")
        return None

    def known(self) -> list[ComputeTime]:
        return [ComputeTime(compute_s=2.0)]


def written(folder: Path) -> tuple[pytorch.TorchHooks, Written]:
    attachment = Attachment(job="j", rank=0, world_size=1, pid=os.getpid())
    clock, own = Written(), Ring.create(folder, attachment)
    return pytorch.TorchHooks(own, 0, WaitAwareClock(clock, own.count_error)), clock


def told_in(own: Ring) -> list[MicroBatchRecord]:
    assert own.path is not None
    return [r for r in records_in(own.path) if isinstance(r, MicroBatchRecord)]


def test_torch_knows_place_and_clock(tmp_path: Path, alone: None) -> None:
    pace = pytorch.attach(job="j", ring_dir=str(tmp_path), device="cpu", role="stage1")
    assert pace.ring.path is not None
    pace.detach()
    attached = shm_ring.decode_header(pace.ring.path.read_bytes())
    assert (attached.rank, attached.world_size, attached.role) == (0, 1, "stage1")
    assert attached.clock is Clock.CPU


def test_a_wait_that_is_told_and_overheard_is_one_wait(tmp_path: Path, alone: None) -> None:
    pace, clock = written(tmp_path)
    with pace.step(0), pace.micro_batch_timer(tokens=1), pace.waiting():
        dist.barrier()
    dist.barrier()  # in no micro-batch
    assert clock.heard == ["begin", "pause", "resume", "end"]
    pace.detach()


def test_a_micro_batch_that_raised_in_a_wait_leaves_nothing_paused(
    tmp_path: Path, alone: None
) -> None:
    pace, clock = written(tmp_path)
    with pytest.raises(OSError, match="gone"), pace.micro_batch_timer(tokens=1):
        pace.timer.pause()
        raise OSError("gone")
    clock.heard.clear()
    with pace.step(0), pace.micro_batch_timer(tokens=1):
        pace.timer.resume()  # the end of that wait
        dist.all_reduce(torch.ones(1))
    pace.detach()
    begun, *waits, ended = clock.heard
    assert (begun, ended) == ("begin", "end")
    assert waits == ["pause", "resume"] * (len(waits) // 2) != []


def test_times_that_come_late_are_told_at_the_end(tmp_path: Path) -> None:
    pace, _ = written(tmp_path)
    with pace.step(0), pace.micro_batch_timer(tokens=7):
        pass
    assert told_in(pace.ring) == []
    pace.detach()
    assert [(r.tokens, r.compute_s) for r in told_in(pace.ring)] == [(7, 2.0)]


def test_torch_is_as_it_was_after_the_end(tmp_path: Path, alone: None) -> None:
    def places() -> list[object]:
        return [c10d.Work.wait, vars(torch.autograd)["_engine_run_backward"]]

    before = places()
    pace = pytorch.attach(job="j", device="cpu", ring_dir=str(tmp_path))
    assert all(now is not then for now, then in zip(places(), before, strict=True))
    pace.detach()
    assert places() == before


def test_rows_of_a_layer_that_is_computed_again_are_told_once(tmp_path: Path) -> None:
    pace = pytorch.attach(job="j", device="cpu", ring_dir=str(tmp_path))
    with pace.step(0), pace.micro_batch_timer(tokens=3) as told:

        def layer(x: torch.Tensor) -> torch.Tensor:
            told.add_expert_rows([2, 1])
            return torch.sin(x)

        leaf = torch.ones(3, requires_grad=True)
        hidden: torch.Tensor = checkpoint(layer, leaf, use_reentrant=False)
        hidden.sum().backward()
    assert [(r.expert_rows, r.num_active_experts) for r in told_in(pace.ring)] == [(3, 2)]
    pace.detach()
