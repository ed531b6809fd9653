"""What `pacekeeper.attach(model, optimizer)` adds to a micro-batch, between marks around its hooks.

Used by `benchmarks.adapter_cost`. A micro-batch takes time stamps where the hooks have not run yet
and where they have run: before and within the model's call, within the passes of the first and the
last node of its graph, and after the backward pass. Between two marks lie our hooks and little of
torch, so a gap of microseconds is measured in place, after a micro-batch of any length has emptied
the caches. `cost` is the sum over the gaps of the difference of medians, with and without the
attachment in turn; another process that takes the core for a while moves no median. Hooks around
the forward pass and at both ends of the backward pass that only read two clocks take their turn,
too.
"""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from time import monotonic, perf_counter, thread_time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import pacekeeper
from pacekeeper.trainer.adapters.instrumentation.module_passes import (
    CALL,
    GradientHook,
    at_end_of_backward,
)

BATCHES = 4  # of a step
COLD_STEPS = 3  # after an attachment, that say nothing yet
# Pairs of marks of a micro-batch, with hooks between them.
GAPS = {
    "forward begins": (0, 1),
    "forward ends": (2, 3),
    "backward is called": (4, 5),
    "backward begins": (5, 6),
    "backward ends": (7, 8),
}
_marks: list[float] = []  # of the micro-batch that runs


class Size(NamedTuple):
    """A model of linear layers; `steps` are taken with and without the attachment, each time."""

    name: str
    hidden: int
    layers: int
    steps: int


SIZES = (
    Size("small", hidden=16, layers=4, steps=40),
    Size("large", hidden=1024, layers=8, steps=6),
)


class _Mark(torch.autograd.Function):
    """Passes a tensor on, and takes the time in the backward pass."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        _marks.append(perf_counter())
        return gradients[0]


def _mark(value: Tensor) -> Tensor:
    marked: Tensor = _Mark.apply(value)  # type: ignore[no-untyped-call]
    return marked


class MarkedModel(nn.Module):
    """Takes the time first and last, in both directions."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.embed = nn.Embedding(64, size.hidden)
        self.layers = nn.Sequential(
            *(nn.Linear(size.hidden, size.hidden) for _ in range(size.layers))
        )

    def forward(self, ids: Tensor) -> Tensor:
        _marks.append(perf_counter())
        scale = _mark(self.scale)  # the first node: its backward pass is the last
        out = _mark(self.layers(self.embed(ids) * scale))
        _marks.append(perf_counter())
        return out


class MarkedSGD(torch.optim.SGD):
    """Takes the time where a step has been made and no hook of it has run."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        _marks[:] = [perf_counter()]
        return result


class BareHooks:
    """Hooks around a model's passes that only read the clocks of a thread on a CPU."""

    def __init__(self, model: MarkedModel) -> None:
        self._model = model
        self._read: list[tuple[float, float]] = []
        self._original: Callable[..., Tensor] = model._call_impl
        self._hook = GradientHook(self._backward_begins)
        setattr(model, CALL, self._called)

    def detach(self) -> None:
        setattr(self._model, CALL, None)

    def _called(self, ids: Tensor) -> Tensor:
        self._read.append((thread_time(), monotonic()))
        output = self._original(ids)
        self._read.append((thread_time(), monotonic()))
        self._hook.put_on(output)
        return output

    def _backward_begins(self, gradient: Tensor) -> None:
        self._read.append((thread_time(), monotonic()))
        at_end_of_backward(self._backward_ends)

    def _backward_ends(self) -> None:
        self._read.append((thread_time(), monotonic()))
        self._read.clear()


class Gaps(NamedTuple):
    """Seconds between marks: of micro-batches by gap, of steps, and of whole micro-batches."""

    micro_batch: dict[str, list[float]]
    step: list[float]
    duration: list[float]

    @classmethod
    def empty(cls) -> "Gaps":
        """Return gaps of which none is measured yet."""
        return cls({name: [] for name in GAPS}, [], [])

    def added_us(self, alone: "Gaps") -> dict[str, float]:
        """Return what the micro-batches took longer than those of `alone`, by gap."""
        return {n: _added_us(took, alone.micro_batch[n]) for n, took in self.micro_batch.items()}


def cost(size: Size, rounds: int) -> dict[str, Any]:
    """Return the microseconds that the attachment adds, by gap, per micro-batch and per step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MarkedModel(size)
    optimizer = MarkedSGD(model.parameters(), lr=1e-6)
    ids = torch.zeros(2, 64, dtype=torch.int64)
    alone, bare, watched = Gaps.empty(), Gaps.empty(), Gaps.empty()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            _run(alone, model, optimizer, ids, size.steps)
            hooks = BareHooks(model)
            _run(bare, model, optimizer, ids, size.steps)
            hooks.detach()
            pace = pacekeeper.attach(model, optimizer, job="gaps", ring_dir=folder)
            _run(watched, model, optimizer, ids, size.steps)
            assert pace.ring.num_errors == 0, "all hooks ran"
            pace.detach()
    by_gap = watched.added_us(alone)
    per_step = _added_us(watched.step, alone.step)
    return {
        "micro_batch_ms": statistics.median(alone.duration) * 1e3,
        "by_gap_us": by_gap,
        "per_micro_batch_us": sum(by_gap.values()),
        "bare_hooks_us": sum(bare.added_us(alone).values()),
        "per_step_us": per_step,
        "with_part_of_step_us": sum(by_gap.values()) + per_step / BATCHES,
    }


def _run(
    found: Gaps, model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, steps: int
) -> None:
    for step in range(steps + COLD_STEPS):
        for _ in range(BATCHES):
            times = micro_batch(model, ids)
            if step >= COLD_STEPS:
                for name, (begin, end) in GAPS.items():
                    found.micro_batch[name].append(times[end] - times[begin])
                found.duration.append(times[-1] - times[0])
        optimizer.step()
        ended_s = perf_counter()
        if step >= COLD_STEPS:
            found.step.append(ended_s - _marks[0])
        optimizer.zero_grad()


def micro_batch(model: Callable[[Tensor], Tensor], ids: Tensor) -> list[float]:
    """Run one micro-batch; return its nine marks."""
    _marks[:] = [perf_counter()]
    out = model(ids)
    _marks.append(perf_counter())
    loss = _mark(out).sum()
    _marks.append(perf_counter())
    loss.backward()
    _marks.append(perf_counter())
    assert len(_marks) == 9, _marks
    return list(_marks)


def _added_us(watched: Sequence[float], alone: Sequence[float]) -> float:
    return (statistics.median(watched) - statistics.median(alone)) * 1e6
