"""A rank's part of a pipeline: its stage of the model, and the program that the stage runs.

The order of chunks and messages is data (`core/layout/pipeline_schedule.py`). Hidden states travel
between stages, nothing else: each stage knows the micro-batch itself, for masks and positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pacekeeper.core.layout.pipeline_schedule import ChunkKind, ChunkOp, Exchange, StageProgram
from pacekeeper.trainer.groups.group import Group
from pacekeeper.trainer.parallel.mesh.row_deal import MicroBatchRows, Neighbours
from pacekeeper.trainer.parallel.mesh.tensor_regions import TokenSlices
from pacekeeper.trainer.parallel.mesh.token_slices import MeshPlace


class StageModel:
    """The decoder layers of a model as one stage: what enters the first, and what leaves the last.

    Args:
        layers: All decoder layers; those of other stages pass hidden states on.
        slices: The micro-batch; its rows are cut where they enter the layers.
    """

    def __init__(self, layers: Sequence[nn.Module], slices: TokenSlices) -> None:
        self._slices = slices
        self.place: MeshPlace | None = None
        self.entered: Tensor | None = None
        self.left: Tensor | None = None
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._enter(number), with_kwargs=True)
            layer.register_forward_hook(self._leave(number))

    def _enter(self, number: int) -> Callable[..., Any]:
        def enter(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
            place = self.place
            if place is None or number != place.stage.first_layer:
                return None
            hidden = args[0] if args else given["hidden_states"]
            if self.entered is not None:
                hidden = self.entered
            elif place.is_cut:
                own = self._slices.own
                hidden = hidden.flatten(0, 1)[own.start : own.stop][None]
            return (
                ((hidden, *args[1:]), given) if args else (args, given | {"hidden_states": hidden})
            )

        return enter

    def _leave(self, number: int) -> Callable[..., None]:
        def leave(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            place = self.place
            if place is not None and not place.is_last and number == place.stage.end_layer - 1:
                self.left = output[0] if isinstance(output, tuple) else output

        return leave


@dataclass(kw_only=True, eq=False, slots=True)
class OpenMicroBatch:
    """A micro-batch under way on this stage.

    Attributes:
        number: Of the micro-batch in the step.
        shape: (rows, tokens of a row).
        rows: Who has which rows of it, and of the stages before and after.
        entered: What came from the stage before: a leaf, whose gradient goes back.
        left: What goes to the stage after; for the last stage None.
        objective: What the backward pass begins with besides the gradient of `left`; None: nothing.
        gradient: Of `left`, from the stage after.
    """

    number: int
    shape: tuple[int, int]
    rows: MicroBatchRows
    entered: Tensor | None = None
    left: Tensor | None = None
    objective: Tensor | None = None
    gradient: Tensor | None = None


class StageWork(Protocol):
    """What computes the micro-batches of a stage."""

    def open(self, number: int) -> OpenMicroBatch:
        """Begin a micro-batch: its first chunk, or its first message, comes next."""

    def forward(self, micro: OpenMicroBatch) -> None:
        """Run the forward pass; sets `left`, or for the last stage `objective`."""

    def backward(self, micro: OpenMicroBatch) -> None:
        """Run the backward pass."""

    def weight_gradients(self, number: int) -> None:
        """Compute the gradients of weights that `backward` of a micro-batch has left."""

    def suspend(self) -> None:
        """Compute nothing for a while: messages are waited for."""


@dataclass(kw_only=True, eq=False)
class StageRun:
    """Runs the program of a rank's stage once.

    Attributes:
        place: Of the rank.
        exchange: All ranks of the layout.
        work: Computes chunks.
        hidden_size: Of a token's hidden state.
        dtype: Of hidden states between stages.
        device: Where they are.
    """

    place: MeshPlace
    exchange: Group
    work: StageWork
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    _open: dict[int, OpenMicroBatch] = field(default_factory=dict)

    def run(self, program: StageProgram) -> None:
        """Compute all chunks, and exchange what goes between stages.

        Raises:
            PeerLost: A rank is lost.
        """
        for item in program:
            if isinstance(item, Exchange):
                self._exchange(item)
                continue
            match item.kind:
                case ChunkKind.FORWARD:
                    self.work.forward(self._micro(item.micro_batch))
                case ChunkKind.BACKWARD:
                    self.work.backward(self._micro(item.micro_batch))
                    if self.place.is_first:
                        del self._open[item.micro_batch]
                case ChunkKind.WEIGHT_GRADIENT:
                    self.work.weight_gradients(item.micro_batch)

    def forward_only(self, num_micro_batches: int) -> None:
        """Run forward passes one after the other, as in an evaluation.

        Raises:
            PeerLost: A rank is lost.
        """
        for number in range(num_micro_batches):
            op = ChunkOp(ChunkKind.FORWARD, number)
            if not self.place.is_first:
                self._exchange(Exchange((), (op,)))
            self.work.forward(self._micro(number))
            if not self.place.is_last:
                self._exchange(Exchange((op,), ()))
            del self._open[number]

    def _micro(self, number: int) -> OpenMicroBatch:
        if number not in self._open:
            self._open[number] = self.work.open(number)
        return self._open[number]

    def _exchange(self, exchange: Exchange) -> None:
        self.work.suspend()
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        for op in exchange.sends:
            micro = self._micro(op.micro_batch)
            if op.kind is ChunkKind.FORWARD:
                assert micro.left is not None, "computed before it is sent"
                rows, others = micro.left.detach(), micro.rows.after
            else:
                assert micro.entered is not None, "received before its gradient is sent"
                gradient = micro.entered.grad
                rows = torch.zeros_like(micro.entered) if gradient is None else gradient
                others = micro.rows.before
                del self._open[op.micro_batch]
            rows = rows.to(self.dtype).reshape(-1, self.hidden_size).contiguous()
            sends += self._messages(micro, others, rows)
        for op in exchange.receives:
            micro = self._micro(op.micro_batch)
            is_forward = op.kind is ChunkKind.FORWARD
            num_rows = len(self.place.tokens(micro.shape[0] * micro.shape[1]))
            # Zero for a micro-batch of which this stage has no rows: nothing arrives.
            rows = torch.zeros(num_rows, self.hidden_size, dtype=self.dtype, device=self.device)
            others = micro.rows.before if is_forward else micro.rows.after
            receives += self._messages(micro, others, rows)
            shaped = rows[None] if self.place.is_cut else rows.view(*micro.shape, -1)
            if is_forward:
                micro.entered = shaped
            else:
                micro.gradient = shaped
        if sends or receives:
            self.exchange.point_to_point(sends, receives).wait()

    def _messages(
        self, micro: OpenMicroBatch, others: Neighbours, rows: Tensor
    ) -> list[tuple[int, Tensor]]:
        """Each rank of other stages that has tokens of this one, and what it has of `rows`."""
        row_tokens = micro.shape[1]
        own = self.place.tokens(micro.shape[0] * row_tokens)
        cuts = micro.rows.crossing(own, others, row_tokens)
        return [(rank, rows[cut.start : cut.stop]) for rank, cut in cuts.items()]
