"""Counted work of a rank's compute segments: floating-point operations, bytes, kernels. No torch.

A segment is the compute between two collectives. The model calls `add` while it computes forward
and `boundary` before each forward collective; the collective's backward calls
`backward_boundary`, and the clock takes what has piled up. Backward work counts twice the forward
work of the same segment (gradients of inputs and of weights). Passes of several micro-batches may
be open at once: each keeps its own segments.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCount:
    """An amount of device work."""

    flops: float = 0.0
    bytes: float = 0.0
    kernels: float = 0.0

    def __add__(self, other: "OpCount") -> "OpCount":
        return OpCount(
            flops=self.flops + other.flops,
            bytes=self.bytes + other.bytes,
            kernels=self.kernels + other.kernels,
        )

    def scaled(self, factor: float) -> "OpCount":
        """This work `factor` times over."""
        return OpCount(
            flops=self.flops * factor, bytes=self.bytes * factor, kernels=self.kernels * factor
        )

    def in_part(self, share: float) -> "OpCount":
        """A part of it on one of several devices: each starts all the kernels."""
        return OpCount(flops=self.flops * share, bytes=self.bytes * share, kernels=self.kernels)


NO_WORK = OpCount()


@dataclass(slots=True)
class WorkMeter:
    """Adds up the work of one rank; one per rank, used by one thread."""

    _pending: OpCount = NO_WORK  # since the last take
    # Since the last reset: tokens routed to each expert by all ranks of a stage, by layer.
    routed: dict[int, list[int]] = field(default_factory=dict)

    def add(self, work: OpCount) -> None:
        """Work that is done now."""
        self._pending += work

    def add_routed(self, layer: int, tokens_E: Sequence[int]) -> None:
        """Of a micro-batch."""
        before = self.routed.get(layer, [0] * len(tokens_E))
        self.routed[layer] = [a + b for a, b in zip(before, tokens_E, strict=True)]

    def take(self) -> OpCount:
        """The work since the last take."""
        work, self._pending = self._pending, NO_WORK
        return work

    def reset(self) -> None:
        """Forget what was not taken: a pass was broken off."""
        self._pending = NO_WORK
        self.routed.clear()


@dataclass(slots=True)
class WorkPass:
    """The work of one micro-batch on one stage, forward and backward; tells the `meter`.

    `later`: where weight gradients are computed apart from those of inputs, what is left to do.
    """

    meter: WorkMeter
    later: list[Callable[[], None]] | None = None
    _segment: OpCount = NO_WORK  # forward work of the segment that is open
    _segments: list[OpCount] = field(default_factory=list)  # closed forward segments

    def add(self, work: OpCount) -> None:
        """Forward work in the segment that is open."""
        self.meter.add(work)
        self._segment += work

    def boundary(self) -> int:
        """Just before a forward collective: closes the segment; returns the boundary's number."""
        self._segments.append(self._segment)
        self._segment = NO_WORK
        return len(self._segments) - 1

    def backward_boundary(self, number: int) -> None:
        """Just before the backward collective of boundary `number`.

        The segment behind that boundary has just been walked backward.
        """
        behind = self._segments[number + 1] if number + 1 < len(self._segments) else self._segment
        self._walked_back(behind)

    def finish_backward(self) -> None:
        """After the whole backward pass: the first segment's share."""
        self._walked_back(self._segments[0] if self._segments else self._segment)

    def compute_weight_gradients(self) -> None:
        """Those that were left for later: as much work as the forward pass."""
        assert self.later is not None, "the pass is split"
        for segment in (*self._segments, self._segment):
            self.meter.add(segment)
        for compute in self.later:
            compute()
        self.later.clear()

    def _walked_back(self, forward: OpCount) -> None:
        self.meter.add(forward.scaled(2.0 if self.later is None else 1.0))


def attention_work(tokens: int, sum_len_squared: int, hidden_size: int) -> OpCount:
    """Norm, four projections, block-diagonal attention (variable-length kernel), residual."""
    projections = 8.0 * tokens * hidden_size**2
    scores = 4.0 * sum_len_squared * hidden_size
    weights = 4.0 * hidden_size**2
    return OpCount(
        flops=projections + scores,
        bytes=FLOAT_BYTES * (weights + 10.0 * tokens * hidden_size),
        kernels=10,
    )


def router_work(tokens: int, hidden_size: int, num_experts: int) -> OpCount:
    """Norm, router, top-k, and the sort that brings tokens into dispatch order."""
    return OpCount(
        flops=2.0 * tokens * hidden_size * num_experts,
        bytes=FLOAT_BYTES * tokens * (4.0 * hidden_size + 4.0 * num_experts),
        kernels=10,
    )


def expert_work(rows: int, num_active: int, hidden_size: int, expert_hidden_size: int) -> OpCount:
    """Two matrices of each active local expert over all rows routed here."""
    return OpCount(
        flops=4.0 * rows * hidden_size * expert_hidden_size,
        bytes=FLOAT_BYTES
        * (
            2.0 * num_active * hidden_size * expert_hidden_size
            + rows * (2.0 * hidden_size + 2.0 * expert_hidden_size)
        ),
        kernels=4 + 2 * num_active,
    )


def combine_work(tokens: int, experts_per_token: int, hidden_size: int) -> OpCount:
    """Weighted sum of the experts' answers."""
    return OpCount(
        flops=2.0 * tokens * experts_per_token * hidden_size,
        bytes=FLOAT_BYTES * tokens * hidden_size * (experts_per_token + 1.0),
        kernels=3,
    )


def head_work(tokens: int, hidden_size: int, vocabulary: int) -> OpCount:
    """Last norm, head, cross-entropy."""
    return OpCount(
        flops=2.0 * tokens * hidden_size * vocabulary,
        bytes=FLOAT_BYTES * (vocabulary * hidden_size + 2.0 * tokens * vocabulary),
        kernels=6,
    )
