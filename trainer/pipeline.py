"""A rank's part of a step: runs its stage's program over its micro-batches. The order is data
(core/schedule.py); here nothing is decided.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from pacekeeper.core.schedule import ChunkKind, ChunkOp, Exchange, StageProgram
from pacekeeper.trainer.collectives import Posted
from pacekeeper.trainer.crossing import Crossings
from pacekeeper.trainer.data import Batch
from pacekeeper.trainer.model import ModelOutput, MoETransformer
from pacekeeper.trainer.timing import ComputeTime
from pacekeeper.trainer.work import WorkMeter, WorkPass


class Turns(Protocol):
    """What times micro-batches that take turns: `PipelineClock` without its pauses."""

    def begin(self) -> None: ...

    def set_aside(self) -> object: ...

    def take_up(self, aside: object) -> None: ...

    def end(self) -> ComputeTime | None: ...


@dataclass(slots=True, kw_only=True)
class Under:
    """A micro-batch under way on this stage.

    entered_SD: a leaf, its gradient goes back; gradient_SD: of what left.
    """

    batch: Batch
    work: WorkPass
    entered_SD: Tensor | None = None
    output: ModelOutput | None = None
    gradient_SD: Tensor | None = None
    aside: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How sums over this rank's rows become its part of the job's loss."""

    targets: int  # of the step's global batch
    rows: int
    balance_loss: float

    def balance(self, output: ModelOutput) -> Tensor:
        """The part that every stage has."""
        return self.balance_loss * output.balance_sum / self.rows

    def loss(self, output: ModelOutput) -> Tensor:
        """That of the last stage, which alone knows the targets."""
        return output.loss_sum / self.targets + self.balance(output)


@dataclass(kw_only=True)
class StageRun:
    """One step of one rank. `on_done` is told of each micro-batch and its time, as they end."""

    model: MoETransformer
    program: StageProgram
    crossings: Crossings
    scale: Scale
    meter: WorkMeter
    turns: Turns
    load: Callable[[int], Batch]
    on_done: Callable[[Under, ComputeTime | None], None]
    _under: dict[int, Under] = field(default_factory=dict)

    def run(self) -> None:
        """The whole program. Gradients add up in the parameters. Raises PeerLost."""
        for item, following in zip(self.program, [*self.program[1:], None], strict=True):
            match item:
                case Exchange():
                    self._exchange(item)
                case ChunkOp(ChunkKind.FORWARD, number):
                    # Its own backward comes at once: one piece of work for the clock.
                    self._forward(number, is_last=following == ChunkOp(ChunkKind.BACKWARD, number))
                case ChunkOp(ChunkKind.BACKWARD, number):
                    self._backward(number)
                case ChunkOp():
                    raise AssertionError(f"{item}: this trainer's schedules have none")

    def _forward(self, number: int, *, is_last: bool) -> None:
        micro = self._of(number)
        if micro.entered_SD is not None:
            micro.entered_SD.requires_grad_()
        self.turns.begin()
        micro.output = self.model(micro.batch, micro.work, micro.entered_SD)
        if not is_last:
            micro.aside = self.turns.set_aside()

    def _backward(self, number: int) -> None:
        micro = self._of(number)
        output = micro.output
        assert output is not None, "forward comes first"
        if micro.aside is not None:
            self.turns.take_up(micro.aside)
        if self.crossings.backward_in is None:
            self.scale.loss(output).backward()
        else:
            gradients = [micro.gradient_SD, None]
            torch.autograd.backward([output.tokens_SD, self.scale.balance(output)], gradients)
        micro.work.finish_backward()
        self.on_done(micro, self.turns.end())
        if self.crossings.backward_out is None:
            del self._under[number]

    def _exchange(self, exchange: Exchange) -> None:
        """All messages are under way before the first is waited for. Raises PeerLost."""
        begun = [self._give(op) for op in exchange.sends]
        begun += [self._take(op) for op in exchange.receives]
        for one in begun:
            one.wait()

    def _give(self, op: ChunkOp) -> Posted:
        micro = self._of(op.micro_batch)
        if op.kind is ChunkKind.FORWARD:
            assert self.crossings.forward_out is not None and micro.output is not None
            rows = micro.output.tokens_SD.detach()
            return self.crossings.forward_out.give(rows, micro.batch.num_tokens)
        assert self.crossings.backward_out is not None and micro.entered_SD is not None
        gradient = micro.entered_SD.grad
        assert gradient is not None, "walked back before it is sent"
        del self._under[op.micro_batch]
        return self.crossings.backward_out.give(gradient, micro.batch.num_tokens)

    def _take(self, op: ChunkOp) -> Posted:
        micro = self._of(op.micro_batch)
        rows = self.model.new_slice(micro.batch.num_tokens)
        if op.kind is ChunkKind.FORWARD:
            assert self.crossings.forward_in is not None
            micro.entered_SD = rows
            return self.crossings.forward_in.take(rows, micro.batch.num_tokens)
        assert self.crossings.backward_in is not None
        micro.gradient_SD = rows
        return self.crossings.backward_in.take(rows, micro.batch.num_tokens)

    def _of(self, number: int) -> Under:
        if number not in self._under:
            self._under[number] = Under(batch=self.load(number), work=WorkPass(self.meter))
        return self._under[number]
