"""Reports of the engine to the agent of its node: micro-batches, steps and loads of experts.

Time of planning and exchanging rows is not compute: the experts pause the clock meanwhile. Counts
that are on a CUDA device are read after a later step, when they have arrived: the host does not
wait unless it is many steps ahead.
"""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from pacekeeper.core.telemetry.sign_of_life import COMPUTING, STEPPING
from pacekeeper.trainer.emulation.engine_device import EngineDevice
from pacekeeper.trainer.engine.micro_batches import WorkSize
from pacekeeper.trainer.hooks.compute_timers import (
    DeviceEventClock,
    DeviceTransferTimer,
    PipelineClock,
)
from pacekeeper.trainer.hooks.contexts import MicrobatchTimer
from pacekeeper.trainer.hooks.hooks import Hooks
from pacekeeper.trainer.parallel.experts import ExpertParallel

_MOST_LATE = 8  # steps whose counts may be on their way from the device


@dataclass(slots=True)
class HostTransferTimer:
    """Times exchanges through host memory by wall time.

    The step's time is that of all its bytes at the speed of the middle one (by bytes), as some
    exchanges wait for a core more than for their bytes.
    """

    _spans: list[tuple[float, int]] = field(default_factory=list)  # seconds per byte, bytes

    def begin(self) -> float:
        """Return the time of now."""
        return time.perf_counter()

    def end(self, began: float, num_bytes: int) -> None:
        """End an exchange that moved so many bytes from and to this rank."""
        if num_bytes > 0:
            self._spans.append(((time.perf_counter() - began) / num_bytes, num_bytes))

    def take(self) -> tuple[float | None, int]:
        """Return (seconds, bytes) since the last call; (None, 0) if nothing was moved."""
        spans, self._spans = sorted(self._spans), []
        total, passed = sum(num_bytes for _, num_bytes in spans), 0
        for s_per_byte, num_bytes in spans:
            passed += num_bytes
            if 2 * passed >= total:
                return s_per_byte * total, total
        return None, 0


class Telemetry:
    """One rank's reports.

    Args:
        hooks: The rank's attachment.
        experts: Its experts; they use the attachment's clock from now on.
        time_transfers: Time exchanges by wall time, where the clock times none.
    """

    def __init__(
        self, hooks: Hooks, experts: ExpertParallel, *, time_transfers: bool = False
    ) -> None:
        self._hooks = hooks
        self._clock = cast(PipelineClock, hooks.timer)  # as all that ranks of the engine get
        self._experts = experts
        self._late: deque[tuple[int, Mapping[int, Tensor], torch.cuda.Event | None]] = deque()
        self._begun, self._is_redone = -1, False
        self._timed: dict[int, MicrobatchTimer] = {}
        self._aside: dict[int, object] = {}  # what the clock knows of those that are suspended
        self._running: int | None = None
        experts.clock = hooks.timer
        if isinstance(hooks.timer, EngineDevice):
            experts.compute = hooks.timer.timed(experts.compute)
            experts.transfers = hooks.timer.links
        elif isinstance(hooks.timer, DeviceEventClock):
            experts.transfers = DeviceTransferTimer(hooks.timer.new_event)
        elif time_transfers:
            experts.transfers = HostTransferTimer()

    def begin_step(self, step: int) -> None:
        """Start a step, or start it again after a failure."""
        self._is_redone, self._begun = step == self._begun, step
        self._experts.take_transfers()  # of a step that was not committed
        self._timed.clear()
        self._aside.clear()
        self._running = None
        self._hooks.begin_step(step)

    def begin_micro_batch(
        self, number: int, size: WorkSize, *, head_tokens: int = 0, tensor_share: float = 1.0
    ) -> None:
        """Start to time a micro-batch of the step, in place of another that is timed.

        Args:
            number: Of the micro-batch.
            size: Its cost.
            head_tokens: Tokens of which this rank computes logits, where other ranks may differ.
            tensor_share: Part of the model's attention and dense MLPs that this rank computes.
        """
        self.suspend()
        timer = self._hooks.micro_batch_timer(
            tokens=size.tokens,
            sum_len_squared=size.sum_len_squared,
            num_documents=size.documents,
            head_tokens=head_tokens,
            tensor_share=tensor_share,
        )
        self._timed[number], self._running = timer.__enter__(), number

    def forward_is_over(self, number: int) -> None:
        """Add what the experts computed here in the forward pass of a micro-batch."""
        for rows in self._experts.take_computed_rows():
            self._timed[number].add_expert_rows(rows)

    def suspend(self) -> None:
        """Stop to time the micro-batch that is timed, if any: others are computed, or none."""
        if self._running is not None:
            self._aside[self._running] = self._clock.suspend()
            self._running = None
            self._hooks.ring.enter_phase(STEPPING)

    def resume_micro_batch(self, number: int) -> None:
        """Go on to time a micro-batch."""
        if self._running != number:
            self.suspend()
            self._hooks.ring.enter_phase(COMPUTING)
            self._clock.resume_suspended(self._aside.pop(number))
            self._running = number

    def end_micro_batch(self, number: int) -> None:
        """Report a micro-batch whose backward pass is over."""
        self._timed.pop(number).__exit__(None, None, None)
        self._running = None

    def end_step(self, step: int, size: WorkSize, loss: Tensor) -> None:
        """Report a committed step.

        Args:
            step: Its number.
            size: Of the global batch.
            loss: Mean loss of the global batch; reported where reading it does not wait.
        """
        is_on_host = loss.device.type == "cpu"
        transfer_s, transfer_bytes = self._experts.take_transfers()
        self._hooks.end_step(
            tokens=size.tokens,
            loss=loss.item() if is_on_host else None,
            is_redone=self._is_redone,
            transfer_s=transfer_s,
            transfer_bytes=transfer_bytes,
            sum_len_squared=size.sum_len_squared,
            host_s=self._experts.take_host_s(),
        )
        routed, arrival = self._experts.take_own_rows(), None
        if not is_on_host:
            routed = {
                layer: counts.to("cpu", non_blocking=True) for layer, counts in routed.items()
            }
            arrival = torch.cuda.Event()
            arrival.record()
        self._late.append((step, routed, arrival))
        while self._late and (len(self._late) > _MOST_LATE or _has_arrived(self._late[0][2])):
            of, loads, arrival = self._late.popleft()
            if arrival is not None:
                arrival.synchronize()
            for layer, counts in loads.items():
                self._hooks.report_expert_loads(layer, counts.tolist(), step=of)


def _has_arrived(arrival: torch.cuda.Event | None) -> bool:
    return arrival is None or bool(arrival.query())
