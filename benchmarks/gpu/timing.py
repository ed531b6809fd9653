"""The event clock against the wall clock, the cost of hooks, the engine against transformers."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.common import (
    Ratio,
    Scale,
    Size,
    figure,
    interleaved,
    micro_batch,
    new_event,
    require,
    synchronize,
)
from benchmarks.gpu.models import add_adamw, engine_of, watched
from pacekeeper.trainer.engine.engine import Engine
from pacekeeper.trainer.engine.micro_batches import cross_entropy
from pacekeeper.trainer.hooks.compute_timers import DeviceEventClock
from pacekeeper.trainer.model import library

_CALLS = 500  # of the hooks of an empty micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockRatio:
    """Event time over wall time of one kind of work."""

    work: str = figure("work")
    wall_ms: float = figure("wall, ms")
    median: float = figure("event / wall, median")
    least: float = figure("least")
    most: float = figure("most")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventClock:
    """Figures of `compare_clocks`."""

    ratios: tuple[ClockRatio, ...] = figure("event clock over wall clock with synchronisation")
    steps_ahead: int = figure("micro-batches given to the device without waiting")
    times_known: int = figure("of these, times that the clock knew afterwards")
    num_lost: int = figure("times lost")


def compare_clocks(device: torch.device, scale: Scale) -> EventClock:
    """Time products, and micro-batches of the engine, by events and between synchronisations."""
    ratios = []
    for divisor in (8, 2, 1):
        side = scale.matrix // divisor
        one = torch.randn(side, side, device=device)
        out = torch.empty_like(one)
        work = partial(torch.mm, one, one, out=out)
        ratios.append(_ratio(f"product of {side} x {side}", device, work, scale.repeats))
    for name, size in (("small", scale.small), ("large", scale.large)):
        engine = engine_of(size, device)
        passes = _passes(engine.model, size, device, is_mixed=True)
        ratios.append(_ratio(f"micro-batch of the {name} model", device, passes, scale.repeats))
    clock = DeviceEventClock(lambda: new_event(device))
    known = 0
    for _ in range(scale.repeats):
        clock.begin()
        passes()
        found = clock.end()
        known += 0 if found is None else 1 + len(found.more)
    synchronize(device)
    known += len(clock.known())
    require(known == scale.repeats, f"the clock knew {known} of {scale.repeats} micro-batches")
    return EventClock(
        ratios=tuple(ratios),
        steps_ahead=scale.repeats,
        times_known=known,
        num_lost=clock.num_lost,
    )


def _ratio(name: str, device: torch.device, work: Callable[[], object], repeats: int) -> ClockRatio:
    clock = DeviceEventClock(lambda: new_event(device))
    for _ in range(3):
        work()
    walls, ratios = [], []
    for _ in range(repeats):
        synchronize(device)
        began_s = time.perf_counter()
        clock.begin()
        work()
        clock.end()
        synchronize(device)
        walls.append(time.perf_counter() - began_s)
        known = clock.known()
        require(len(known) == 1, "the clock does not know a time that the device has passed")
        ratios.append(known[0].compute_s / walls[-1])
    return ClockRatio(
        work=name,
        wall_ms=statistics.median(walls) * 1e3,
        median=statistics.median(ratios),
        least=min(ratios),
        most=max(ratios),
    )


def _passes(
    model: nn.Module, size: Size, device: torch.device, *, is_mixed: bool
) -> Callable[[], None]:
    """A forward and a backward pass over one micro-batch."""
    batch = {name: tensor.to(device) for name, tensor in micro_batch(size).items()}

    def run() -> None:
        model.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_mixed):
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        cross_entropy(logits, batch).backward()

    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class HookCost:
    """Figures of `cost_of_hooks`."""

    steps: tuple[Ratio, ...] = figure("a step with hooks over one without")
    by_step_us: float = figure("microseconds a micro-batch by these steps, small model")
    segments: int = figure("segments of a micro-batch: between two exchanges of rows")
    calls_us: float = figure("microseconds on the host of the hooks of an empty micro-batch")


def cost_of_hooks(device: torch.device, scale: Scale) -> HookCost:
    """Time steps of two engines in turn: one reports to a ring, the other to nobody."""
    ratios, micro_batches = [], 2
    with watched(device) as rings:
        for name, size in (("small", scale.small), ("large", scale.large)):
            engine, silent = engine_of(size, device), engine_of(size, device)
            hooks = rings.watch(engine)
            batches = [micro_batch(size, seed) for seed in range(micro_batches)]
            for one in (engine, silent):
                add_adamw(one)
            with_hooks, without = (partial(one.step, batches) for one in (engine, silent))
            ratios.append(interleaved(name, device, with_hooks, without, scale.pairs))
            hooks.detach()
            del engine, silent, with_hooks, without
    small, segments = ratios[0], 1 + scale.small.layers
    spent_s = (small.median - 1.0) * small.against_seconds
    return HookCost(
        steps=tuple(ratios),
        by_step_us=spent_s / micro_batches * 1e6,
        segments=segments,
        calls_us=_calls_us(device, segments),
    )


def _calls_us(device: torch.device, segments: int) -> float:
    """Median microseconds of begin, the pauses, end and the record, without any work between."""
    with watched(device) as rings:
        hooks = rings.attach()
        spent = []
        for _ in range(_CALLS):
            began_s = time.perf_counter()
            with hooks.micro_batch_timer(tokens=1):
                for _ in range(segments - 1):
                    hooks.timer.pause()
                    hooks.timer.resume()
            spent.append(time.perf_counter() - began_s)
        hooks.detach()
    return statistics.median(spent) * 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCost:
    """Figures of `cost_of_engine`."""

    passes: tuple[Ratio, ...] = figure("forward and backward pass over that of transformers")
    steps: tuple[Ratio, ...] = figure("a whole step over one of transformers")
    mixed: tuple[Ratio, ...] = figure("a step with masters in float32 over one in bfloat16")


def cost_of_engine(device: torch.device, scale: Scale) -> EngineCost:
    """Time the engine and the same model with the library's grouped products in turn.

    Both in bfloat16 throughout, with the same weights and rows; a step clips gradients and updates
    by AdamW.
    """
    passes, steps, mixed = [], [], []
    for name, size in (("small", scale.small), ("large", scale.large)):
        bf16: dict[str, Any] = {"dtype": torch.bfloat16, "compute_dtype": None}
        engine, plain = engine_of(size, device, **bf16), engine_of(size, device, **bf16)
        use_library(plain)
        own, theirs = (_passes(one.model, size, device, is_mixed=False) for one in (engine, plain))
        passes.append(interleaved(name, device, own, theirs, scale.pairs))
        add_adamw(engine)
        batch = micro_batch(size)
        own_step = partial(engine.step, [batch])
        steps.append(interleaved(name, device, own_step, _plain_step(plain, size), scale.pairs))
        del plain, theirs
        wide = engine_of(size, device)
        add_adamw(wide)
        wide_step = partial(wide.step, [batch])
        mixed.append(interleaved(name, device, wide_step, own_step, scale.pairs))
        del engine, wide, own, own_step, wide_step
    return EngineCost(passes=tuple(passes), steps=tuple(steps), mixed=tuple(mixed))


def use_library(engine: Engine) -> None:
    """Let the library compute the experts of an engine of one rank, by grouped products."""
    for one in engine.skeleton.experts:
        if one is not None:
            library.use_library_experts(one.module)


def _plain_step(engine: Engine, size: Size) -> Callable[[], None]:
    """A step as a training loop of transformers makes it, with the sum of losses divided."""
    model, device = engine.model, engine.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device.type == "cuda")
    batch = micro_batch(size)
    if device.type == "cuda":
        batch = {name: tensor.pin_memory() for name, tensor in batch.items()}

    def run() -> None:
        given = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        logits = model(input_ids=given["input_ids"], use_cache=False).logits
        (cross_entropy(logits, given) / batch["labels"].numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run
