"""What `pacekeeper.attach(model, optimizer)` adds to a micro-batch, between marks around its hooks.

Used by `benchmarks.adapter_cost`. A micro-batch takes time stamps where the hooks have not run yet
and where they have run: before and within the model's call, within the passes of the first and the
last node of its graph, and after the backward pass. Between two marks lie our hooks and little of
torch, so a gap of microseconds is measured in place, after a micro-batch of any length has emptied
the caches. `cost` is the sum over the gaps of the difference of medians, with and without the
attachment in turn; another process that takes the core for a while moves no median. Its interval
comes from rounds drawn again with replacement, since micro-batches of one round share its noise.
Hooks around the forward pass and at both ends of the backward pass that only read two clocks take
their turn, too.

One size computes as little as the small one, but its passes write more memory than caches hold: it
tells what hooks cost in cold caches.
"""

import random
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
RESAMPLES, COVERED = 400, 0.95  # of the interval of a cost
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
    written_mib: int = 0  # by each pass, besides


SIZES = (
    Size("small", hidden=16, layers=4, steps=40),
    Size("small, cold caches", hidden=16, layers=4, steps=10, written_mib=64),
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


class _Write(torch.autograd.Function):
    """Passes a tensor on, and writes all of another one in both directions."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, written: Tensor) -> Tensor:
        ctx.written = written.add_(1)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.written.add_(1)
        return gradients[0], None


def _mark(value: Tensor) -> Tensor:
    marked: Tensor = _Mark.apply(value)  # type: ignore[no-untyped-call]
    return marked


class MarkedModel(nn.Module):
    """Takes the time first and last, in both directions."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.written = torch.zeros(size.written_mib << 20, dtype=torch.uint8)
        self.scale = nn.Parameter(torch.ones(1))
        self.embed = nn.Embedding(64, size.hidden)
        self.layers = nn.Sequential(
            *(nn.Linear(size.hidden, size.hidden) for _ in range(size.layers))
        )

    def forward(self, ids: Tensor) -> Tensor:
        _marks.append(perf_counter())
        scale = _mark(self.scale)  # the first node: its backward pass is the last
        hidden = self.embed(ids) * scale
        if len(self.written):
            hidden = _Write.apply(hidden, self.written)  # type: ignore[no-untyped-call]
        out = _mark(self.layers(hidden))
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
    """Seconds between marks of a run: of micro-batches by gap, of steps, of whole micro-batches."""

    micro_batch: dict[str, list[float]]
    step: list[float]
    duration: list[float]

    @classmethod
    def empty(cls) -> "Gaps":
        """Return gaps of which none is measured yet."""
        return cls({name: [] for name in GAPS}, [], [])

    @classmethod
    def of_all(cls, runs: "Sequence[Gaps]") -> "Gaps":
        """Return those of several runs."""
        return cls(
            {name: [s for run in runs for s in run.micro_batch[name]] for name in GAPS},
            [s for run in runs for s in run.step],
            [s for run in runs for s in run.duration],
        )


class Added(NamedTuple):
    """Microseconds that some runs took longer than others."""

    by_gap_us: dict[str, float]  # of a micro-batch
    per_step_us: float

    @classmethod
    def of(cls, runs: Sequence[Gaps], alone: Sequence[Gaps]) -> "Added":
        """Compare the medians of `runs` with those of `alone`."""
        took, less = Gaps.of_all(runs), Gaps.of_all(alone)
        by_gap_us = {n: _added_us(took.micro_batch[n], less.micro_batch[n]) for n in GAPS}
        return cls(by_gap_us, _added_us(took.step, less.step))

    @property
    def per_micro_batch_us(self) -> float:
        return sum(self.by_gap_us.values())

    @property
    def with_part_of_step_us(self) -> float:
        return self.per_micro_batch_us + self.per_step_us / BATCHES


def interval_us(watched: Sequence[Gaps], alone: Sequence[Gaps]) -> tuple[float, float]:
    """Return the interval, of COVERED, of what a micro-batch with its part of a step costs.

    Args:
        watched: Runs with the attachment, one of each round.
        alone: Runs without it, in the same order.
    """
    draw, costs = random.Random(0), list[float]()
    for _ in range(RESAMPLES):
        drawn = draw.choices(range(len(alone)), k=len(alone))
        added = Added.of([watched[i] for i in drawn], [alone[i] for i in drawn])
        costs.append(added.with_part_of_step_us)
    costs.sort()
    beyond = round((1.0 - COVERED) / 2 * RESAMPLES)
    return costs[beyond], costs[-1 - beyond]


def cost(size: Size, rounds: int) -> dict[str, Any]:
    """Return the microseconds that the attachment adds, by gap, per micro-batch and per step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MarkedModel(size)
    optimizer = MarkedSGD(model.parameters(), lr=1e-6)
    ids = torch.zeros(2, 64, dtype=torch.int64)
    alone, bare, watched = list[Gaps](), list[Gaps](), list[Gaps]()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            alone.append(_run(model, optimizer, ids, size.steps))
            hooks = BareHooks(model)
            bare.append(_run(model, optimizer, ids, size.steps))
            hooks.detach()
            pace = pacekeeper.attach(model, optimizer, job="gaps", ring_dir=folder)
            watched.append(_run(model, optimizer, ids, size.steps))
            assert pace.ring.num_errors == 0, "all hooks ran"
            pace.detach()
    added = Added.of(watched, alone)
    return {
        "micro_batch_ms": statistics.median(Gaps.of_all(alone).duration) * 1e3,
        "by_gap_us": added.by_gap_us,
        "per_micro_batch_us": added.per_micro_batch_us,
        "bare_hooks_us": Added.of(bare, alone).per_micro_batch_us,
        "per_step_us": added.per_step_us,
        "with_part_of_step_us": added.with_part_of_step_us,
        "interval_us": interval_us(watched, alone),
    }


def _run(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, steps: int) -> Gaps:
    found = Gaps.empty()
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
    return found


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
