"""A rank's part of a step: runs its stage's program over its micro-batches. The order is data
(core/layout/pipeline_schedule.py); here nothing is decided.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from pacekeeper.core.layout.pipeline_schedule import ChunkKind, ChunkOp, Exchange, StageProgram
from pacekeeper.trainer.distributed.collectives import Posted
from pacekeeper.trainer.hooks.compute_timers import ComputeTime
from pacekeeper.trainer.toy.model.dataset import Batch
from pacekeeper.trainer.toy.model.flop_counter import WorkMeter, WorkPass
from pacekeeper.trainer.toy.model.transformer import ModelOutput, MoETransformer
from pacekeeper.trainer.toy.parallel.stage_p2p import StageP2P


class SuspendableTimer(Protocol):
    """What times micro-batches that take turns: `PipelineClock` without its pauses."""

    def begin(self) -> None: ...

    def suspend(self) -> object: ...

    def resume_suspended(self, aside: object) -> None: ...

    def end(self) -> ComputeTime | None: ...


@dataclass(slots=True, kw_only=True)
class InFlightMicrobatch:
    """A micro-batch under way on this stage.

    entered_SD: a leaf, its gradient goes back; gradient_SD: of what left. `to_come`: of its last
    chunk and its gradient's leaving.
    """

    batch: Batch
    work: WorkPass
    to_come: int
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
    crossings: StageP2P
    scale: Scale
    meter: WorkMeter
    turns: SuspendableTimer
    load: Callable[[int], Batch]
    on_done: Callable[[InFlightMicrobatch, ComputeTime | None], None]
    _in_flight: dict[int, InFlightMicrobatch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        chunks = {item.kind for item in self.program if isinstance(item, ChunkOp)}
        self._is_split = ChunkKind.WEIGHT_GRADIENT in chunks

    def run(self) -> None:
        """The whole program. Gradients add up in the parameters. Raises PeerLost."""
        for item, following in zip(self.program, [*self.program[1:], None], strict=True):
            if isinstance(item, Exchange):
                self._exchange(item)
                continue
            # What comes at once for the same micro-batch is one piece of work for the clock.
            is_turn_over = (
                not isinstance(following, ChunkOp) or following.micro_batch != item.micro_batch
            )
            self._compute(item, is_turn_over=is_turn_over)

    def _compute(self, op: ChunkOp, *, is_turn_over: bool) -> None:
        micro = self._of(op.micro_batch)
        if op.kind is ChunkKind.FORWARD:
            self.turns.begin()
        elif micro.aside is not None:
            self.turns.resume_suspended(micro.aside)
        match op.kind:
            case ChunkKind.FORWARD:
                if micro.entered_SD is not None:
                    micro.entered_SD.requires_grad_()
                micro.output = self.model(micro.batch, micro.work, micro.entered_SD)
            case ChunkKind.BACKWARD:
                self._walk_back(micro)
            case ChunkKind.WEIGHT_GRADIENT:
                micro.work.compute_weight_gradients()
        is_last = op.kind is (ChunkKind.WEIGHT_GRADIENT if self._is_split else ChunkKind.BACKWARD)
        if is_last:
            self.on_done(micro, self.turns.end())
            self._is_over(op.micro_batch)
        else:
            micro.aside = self.turns.suspend() if is_turn_over else None

    def _walk_back(self, micro: InFlightMicrobatch) -> None:
        output = micro.output
        assert output is not None, "forward comes first"
        if self.crossings.backward_in is None:
            self.scale.loss(output).backward()
        else:
            gradients = [micro.gradient_SD, None]
            torch.autograd.backward([output.tokens_SD, self.scale.balance(output)], gradients)
        micro.work.finish_backward()

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
        self._is_over(op.micro_batch)
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

    def _of(self, number: int) -> InFlightMicrobatch:
        if number not in self._in_flight:
            work = WorkPass(self.meter, later=[] if self._is_split else None)
            to_come = 1 if self.crossings.backward_out is None else 2  # its gradient leaves
            self._in_flight[number] = InFlightMicrobatch(
                batch=self.load(number), work=work, to_come=to_come
            )
        return self._in_flight[number]

    def _is_over(self, number: int) -> None:
        """One of the last things that are done with a micro-batch: nothing needs it after both."""
        self._in_flight[number].to_come -= 1
        if not self._in_flight[number].to_come:
            del self._in_flight[number]
