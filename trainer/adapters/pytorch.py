"""Adapter for plain PyTorch: hooks whose clock excludes waits inside torch.

    pace = pytorch.attach(job="my-run")
    with pace.step(step), pace.micro_batch_timer(tokens=batch.numel()):
        model(batch).backward()  # waits of DDP, FSDP and pipelines are not counted

A user's `with` block cannot enclose waits inside torch (DDP in `backward`, FSDP2 in each layer,
pipelines between passes), and with them each rank looks as slow as the slowest. See
`instrumentation/collectives.py`. No hook is put into a model: compiled graphs and recomputed passes
are unchanged. docs/trainer-torch.md lists what was tested.
"""

from collections.abc import Sequence

import torch

from pacekeeper.core.telemetry.attachment import ModelShape
from pacekeeper.trainer.adapters import reporter
from pacekeeper.trainer.adapters.instrumentation.collectives import CollectiveWaits, waits_of_fsdp
from pacekeeper.trainer.adapters.instrumentation.module_passes import is_in_backward
from pacekeeper.trainer.hooks.compute_timers import ComputeTime, LateClock, SegmentClock
from pacekeeper.trainer.hooks.contexts import MicrobatchTimer
from pacekeeper.trainer.hooks.hooks import Hooks
from pacekeeper.trainer.hooks.ring_writer import Ring


def attach(
    *,
    job: str,
    device: torch.device | str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    role: str = "train",
    ring_dir: str | None = None,
    model: ModelShape | None = None,
    micro_batches_per_step: int = 0,
) -> "TorchHooks":
    """Attach this rank of a torch program; call it after `init_process_group`.

    Until `detach`, waits in torch.distributed do not count as compute. The arguments are those of
    `hooks.attach`.

    Args:
        device: Device that computes; default: this process's CUDA device if it has one, else CPU.
        rank: Default: of the default process group, else of torchrun's environment.
        world_size: Default: as `rank`.
        micro_batches_per_step: As in `reporter.attach`.

    Raises:
        ValueError: If the job name or rank is invalid.
    """
    if device is None:
        is_on_cuda = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if is_on_cuda else "cpu"
    pace = reporter.attach(
        job=job,
        device=torch.device(device),
        rank=rank,
        world_size=world_size,
        role=role,
        ring_dir=ring_dir,
        model=model,
        micro_batches_per_step=micro_batches_per_step,
    )
    return TorchHooks(pace.ring, pace.rank, WaitAwareClock(pace.timer, pace.ring))


class TorchMicrobatchTimer(MicrobatchTimer):
    """A micro-batch timer that ignores expert rows of recomputation in the backward pass."""

    __slots__ = ()

    def add_expert_rows(self, rows: Sequence[int] | int) -> None:
        if not is_in_backward():
            super().add_expert_rows(rows)


class TorchHooks(Hooks):
    """Hooks of one rank of a torch program."""

    micro_batch_block = TorchMicrobatchTimer

    def __init__(self, ring: Ring, rank: int, timer: "WaitAwareClock") -> None:
        super().__init__(ring, rank, timer)
        self._waits = timer.waits
        self._waits.attach(*waits_of_fsdp())

    def detach(self) -> None:
        """End the attachment and restore torch's functions."""
        self._waits.detach()
        super().detach()


class WaitAwareClock:
    """A clock that pauses while torch waits for other ranks, also within an explicit `waiting`."""

    def __init__(self, clock: SegmentClock, ring: Ring) -> None:
        self._clock = clock
        self._depth = 0  # nesting of waits
        self.waits = CollectiveWaits(self, ring.count_error)

    def begin(self) -> None:
        self._depth = 0
        self._clock.begin()
        self.waits.open_pass()

    def pause(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._clock.pause()

    def resume(self) -> None:
        if self._depth:  # a wait left open by an error may end in the next micro-batch
            self._depth -= 1
            if self._depth == 0:
                self._clock.resume()

    def end(self) -> ComputeTime | None:
        self.waits.close_pass()
        return self._clock.end()

    def known(self) -> list[ComputeTime]:
        """Return the times of a late clock that were not returned before."""
        return self._clock.known() if isinstance(self._clock, LateClock) else []
