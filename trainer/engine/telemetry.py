"""Reports of the engine to the agent of its node: micro-batches, steps and loads of experts.

Time of planning and exchanging rows is not compute: the experts pause the clock meanwhile. Counts
that are on a CUDA device are read after a later step, when they have arrived: the host does not
wait unless it is many steps ahead.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from pacekeeper.trainer.emulation.engine_device import EngineDevice
from pacekeeper.trainer.engine.micro_batches import WorkSize
from pacekeeper.trainer.hooks.compute_timers import DeviceEventClock, DeviceTransferTimer
from pacekeeper.trainer.hooks.hooks import Hooks
from pacekeeper.trainer.parallel.experts import ExpertParallel

_MOST_LATE = 8  # steps whose counts may be on their way from the device


class Telemetry:
    """One rank's reports.

    Args:
        hooks: The rank's attachment.
        experts: Its experts; they use the attachment's clock from now on.
    """

    def __init__(self, hooks: Hooks, experts: ExpertParallel) -> None:
        self._hooks = hooks
        self._experts = experts
        self._late: deque[tuple[int, Mapping[int, Tensor], torch.cuda.Event | None]] = deque()
        self._begun, self._is_redone = -1, False
        experts.clock = hooks.timer
        if isinstance(hooks.timer, EngineDevice):
            experts.compute = hooks.timer.timed(experts.compute)
            experts.transfers = hooks.timer.links
        elif isinstance(hooks.timer, DeviceEventClock):
            experts.transfers = DeviceTransferTimer(hooks.timer.new_event)

    def begin_step(self, step: int) -> None:
        """Start a step, or start it again after a failure."""
        self._is_redone, self._begun = step == self._begun, step
        self._experts.take_transfers()  # of a step that was not committed
        self._hooks.begin_step(step)

    @contextmanager
    def micro_batch(self, size: WorkSize) -> Iterator[None]:
        """Time a forward and backward pass, and report it with what the experts computed here."""
        with self._hooks.micro_batch_timer(
            tokens=size.tokens,
            sum_len_squared=size.sum_len_squared,
            num_documents=size.documents,
        ) as timer:
            yield
            for rows in self._experts.take_computed_rows():
                timer.add_expert_rows(rows)

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
