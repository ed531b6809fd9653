"""Plain PyTorch, watched: the five lines of the README, where torch itself waits for other ranks.

    pace = adapter_torch.attach(job="my-run")
    with pace.step(step), pace.micro_batch_timer(tokens=batch.numel()):
        model(batch).backward()  # DDP, FSDP, pipelines: what they wait for others is left out

Waits inside torch (DDP in `backward`, FSDP2 in each layer, pipelines between passes) cannot be
enclosed by a user's `with` block, and with them each rank looks as slow as the slowest: see
`instrumentation/collectives.py`. No hook is put into a model, so that compiled graphs and
recomputed passes are unchanged. docs/trainer-torch.md says what was tested.
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
) -> "TorchHooks":
    """`hooks.attach` with what torch knows: rank and world size of the default process group (else
    of torchrun's environment), and the clock of `device` (default: this process's CUDA device if
    it has one, else the CPU). Until `detach`, waits in torch.distributed are no compute.

    Call it after `init_process_group`. Raises ValueError for a wrong job name or rank only.
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
    )
    return TorchHooks(pace.ring, pace.rank, WaitAwareClock(pace.timer, pace.ring))


class TorchMicrobatchTimer(MicrobatchTimer):
    """Passes over what a backward pass computes again."""

    __slots__ = ()

    def add_expert_rows(self, rows: Sequence[int] | int) -> None:
        if not is_in_backward():
            super().add_expert_rows(rows)


class TorchHooks(Hooks):
    """The seam of one rank of torch."""

    micro_batch_block = TorchMicrobatchTimer

    def __init__(self, ring: Ring, rank: int, timer: "WaitAwareClock") -> None:
        super().__init__(ring, rank, timer)
        self._waits = timer.waits
        self._waits.attach(*waits_of_fsdp())

    def detach(self) -> None:
        """The rank is done; torch is as it was."""
        self._waits.detach()
        super().detach()


class WaitAwareClock:
    """A clock that pauses by itself where torch waits, also inside a wait that it was told of."""

    def __init__(self, clock: SegmentClock, ring: Ring) -> None:
        self._clock = clock
        self._depth = 0  # of waits
        self.waits = CollectiveWaits(self, ring.count_error)

    def begin(self) -> None:
        self._depth = 0
        self._clock.begin()
        self.waits.opened()

    def pause(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._clock.pause()

    def resume(self) -> None:
        if self._depth:  # a wait that an error left open may end in the next micro-batch
            self._depth -= 1
            if self._depth == 0:
                self._clock.resume()

    def end(self) -> ComputeTime | None:
        self.waits.closed()
        return self._clock.end()

    def known(self) -> list[ComputeTime]:
        """Of a clock that tells late, what it has not told yet."""
        return self._clock.known() if isinstance(self._clock, LateClock) else []
