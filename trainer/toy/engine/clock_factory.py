"""Which clock a rank measures with, and what an injected fault of each kind acts on."""

from collections.abc import Mapping

import torch

from pacekeeper.core.config.train import TrainConfig
from pacekeeper.trainer.distributed.device import DeviceBurner, new_event
from pacekeeper.trainer.distributed.process_group import InterruptibleProcessGroup
from pacekeeper.trainer.emulation.device import DeviceModel, EmulatedClock
from pacekeeper.trainer.emulation.faults import COMPUTE_FAULT, LINK_FAULT, Burner, Slowable
from pacekeeper.trainer.emulation.network import EmulatedLinks
from pacekeeper.trainer.hooks.compute_timers import (
    ComputeTime,
    CpuClock,
    DeviceEventClock,
    PipelineClock,
    TransferTimer,
)
from pacekeeper.trainer.toy.model.flop_counter import WorkMeter


def make_clock(
    config: TrainConfig, rank: int, world_size: int, meter: WorkMeter, device: torch.device
) -> tuple[PipelineClock, Mapping[str, Slowable]]:
    """The clock the configuration asks for, and what a fault of each kind acts on."""
    if config.clock == "cpu":
        burner = Burner()
        return CpuClock(burn=burner), {COMPUTE_FAULT: burner}
    if config.clock == "device":
        slower = DeviceBurner(device=device)
        return DeviceEventClock(new_event, burn=slower), {COMPUTE_FAULT: slower}
    seed = config.seed * 1000 + rank
    emulated = EmulatedClock(
        meter=meter,
        device=DeviceModel.calibrated(config, world_size),
        jitter=config.emulated_jitter,
        seed=seed,
    )
    links = EmulatedLinks.calibrated(config, world_size, seed=seed)
    return emulated, {COMPUTE_FAULT: emulated, LINK_FAULT: links}


def make_transfers(config: TrainConfig, targets: Mapping[str, Slowable]) -> TransferTimer | None:
    """What times transfers; `targets` as `make_clock` gave them. None on shared cores ("cpu").

    A transfer's wall time there is mostly waiting for a core: it would accuse a busy host's links.
    """
    links = targets.get(LINK_FAULT)
    if isinstance(links, EmulatedLinks):
        return links
    return None if config.clock == "cpu" else TransferTimer()


class FabricTimer:
    """A rank's clock in a step: collectives of `fabric` pause it during a micro-batch's turn."""

    def __init__(self, clock: PipelineClock, fabric: InterruptibleProcessGroup) -> None:
        self._clock, self._fabric = clock, fabric

    def begin(self) -> None:
        """A micro-batch's first turn."""
        self._fabric.clock = self._clock
        self._clock.begin()

    def suspend(self) -> object:
        """Its turn is over, it is not: what `take_up` goes on with."""
        aside = self._clock.suspend()
        self._fabric.clock = None
        return aside

    def resume_suspended(self, aside: object) -> None:
        """Its next turn."""
        self._fabric.clock = self._clock
        self._clock.resume_suspended(aside)

    def end(self) -> ComputeTime | None:
        """Its last turn is over."""
        compute = self._clock.end()
        self._fabric.clock = None
        return compute
