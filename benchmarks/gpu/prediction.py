"""The price model on device times, and the detector beside a process that takes the device."""

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.common import Scale, device_s, figure, micro_batch, require, synchronize
from benchmarks.gpu.models import Watched, add_adamw, engine_of, watched
from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.telemetry.records import MicroBatchRecord
from pacekeeper.predictor.cost.features import FEATURES, Array, StepSample, sample_of
from pacekeeper.predictor.cost.model import fit
from pacekeeper.predictor.detector.state import begin
from pacekeeper.predictor.detector.update import update_evidence
from pacekeeper.trainer.engine.engine import Engine

FIT_SHARE = 0.6  # of the measurements of a shape that is fitted to
UNSEEN = 4  # of so many shapes one is not fitted to
PEERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors on some micro-batches."""

    judged_on: str = figure("judged on")
    count: int = figure("micro-batches")
    mean: float = figure("mean error")
    median: float = figure("median error")
    p95: float = figure("95 %")
    inside: float = figure("inside the 95 % interval")
    resihp_mean: float = figure("mean error of ResiHP's formula")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Figures of `judge_price_model`."""

    shapes: int = figure("shapes of micro-batches: rows x tokens of a row")
    repeats: int = figure("measurements of each, in random order")
    fastest_ms: float = figure("median of the fastest shape, ms")
    slowest_ms: float = figure("median of the slowest shape, ms")
    noise: float = figure("relative deviation of a measurement from the median of its shape")
    errors: tuple[Errors, ...] = figure("relative errors of the price model")


def judge_price_model(device: torch.device, scale: Scale) -> Prediction:
    """Fit the price model to micro-batches that the engine reported, and judge it on others.

    Times are those of the engine's own records: events of the device, read from the ring as the
    agent does. Three quarters of the shapes are fitted to, by the first measurements of each; the
    later ones of these shapes, and all of the other shapes, are judged.
    """
    order = [shape for shape in scale.shapes for _ in range(scale.repeats)]
    Random(0).shuffle(order)
    with watched(device) as rings:
        engine = engine_of(scale.large, device)
        add_adamw(engine)
        hooks = rings.watch(engine)
        _report(engine, rings, [_batch(engine, scale, shape) for shape in scale.shapes])
        found = []
        for shape in order:
            found += _report(engine, rings, [_batch(engine, scale, shape)])
        hooks.detach()
        found += rings.records()
    found = [record for record in found if record.step >= len(scale.shapes)]
    require(len(found) == len(order), f"{len(found)} records of {len(order)} micro-batches")
    features = np.concatenate([sample_of([record]).features for record in found])
    seconds = np.array([record.compute_s for record in found])
    return _judged(order, features, seconds, scale)


def _judged(
    order: Sequence[tuple[int, int]], features: Array, seconds: Array, scale: Scale
) -> Prediction:
    unseen = set(scale.shapes[UNSEEN // 2 :: UNSEEN])
    seen_so_far: dict[tuple[int, int], int] = {}
    role = []
    for shape in order:
        number = seen_so_far[shape] = seen_so_far.get(shape, 0) + 1
        is_fitted = shape not in unseen and number <= FIT_SHARE * scale.repeats
        role.append("fit" if is_fitted else "unseen" if shape in unseen else "seen")
    roles = np.array(role)
    is_fit = roles == "fit"
    model = fit(
        [
            StepSample(step=i, generation=1, ranks=(0,), features=row[None], observed_s=spent)
            for i, (row, spent) in enumerate(
                zip(features[is_fit], seconds[is_fit][:, None], strict=True)
            )
        ]
    )
    columns = [FEATURES.index("tokens"), FEATURES.index("sum_len_squared")]
    theirs, *_ = np.linalg.lstsq(features[is_fit][:, columns], seconds[is_fit], rcond=None)
    errors = []
    for name, which in (("later, same shapes", "seen"), ("shapes not fitted to", "unseen")):
        rows, spent = features[roles == which], seconds[roles == which]
        off = np.abs(model.expected_s(rows) / spent - 1.0)
        least, most = model.interval_s(rows)
        errors.append(
            Errors(
                judged_on=name,
                count=len(off),
                mean=float(off.mean()),
                median=float(np.median(off)),
                p95=float(np.quantile(off, 0.95)),
                inside=float(np.mean((least <= spent) & (spent <= most))),
                resihp_mean=float(np.abs(rows[:, columns] @ theirs / spent - 1.0).mean()),
            )
        )
    shapes = np.array([scale.shapes.index(shape) for shape in order])
    medians = np.array([np.median(seconds[shapes == n]) for n in range(len(scale.shapes))])
    return Prediction(
        shapes=len(scale.shapes),
        repeats=scale.repeats,
        fastest_ms=float(medians.min()) * 1e3,
        slowest_ms=float(medians.max()) * 1e3,
        noise=float(np.median(np.abs(seconds / medians[shapes] - 1.0))),
        errors=tuple(errors),
    )


def _batch(engine: Engine, scale: Scale, shape: tuple[int, int]) -> dict[str, Tensor]:
    rows, tokens = shape
    return micro_batch(scale.large, seed=rows, rows=rows, row_tokens=tokens)


def _report(
    engine: Engine, rings: Watched, batches: Sequence[dict[str, Tensor]]
) -> list[MicroBatchRecord]:
    """Train a step on each micro-batch; the records that are known by then."""
    found = []
    for batch in batches:
        engine.step([batch])
        synchronize(engine.device)
        found += rings.records()
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """Figures of `detect_competitor`."""

    healthy_steps: int = figure("steps alone")
    disturbed_steps: int = figure("steps beside a process that computes on the same device")
    alone_ms: float = figure("median device time of a micro-batch alone, ms")
    beside_ms: float = figure("beside the process, ms")
    factor: float = figure("measured factor")
    false_findings: int = figure("findings of the detector while alone")
    found_after_steps: int | None = figure("steps after which the detector named the rank")
    found_slowdown: float | None = figure("slowdown that it said")
    recovered_after_steps: int | None = figure("steps after the process ended until it recovered")
    product_factor: float = figure("factor of a product of the probe's size")
    copy_factor: float = figure("factor of a copy of the probe's size")


_PROBE_SIDE, _PROBE_FLOATS = 2048, 1 << 24
_COMPETITOR = """
import sys, torch
side, device = int(sys.argv[1]), torch.device(sys.argv[2])
one = torch.randn(side, side, device=device)
out = torch.empty_like(one)
print("computes", flush=True)
while True:
    for _ in range(8):
        torch.mm(one, one, out=out)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
"""


def detect_competitor(device: torch.device, scale: Scale) -> Contention:
    """Let another process compute on the device, and see what the detector says of the rank.

    The detector of live jobs names a rank beside its peers, and there is one device: three peers
    are played by its own times from before the other process, in another order. Devices are shared
    in turns by default, so device times grow.
    """
    config = DetectorConfig()
    healthy, disturbed, after = config.warmup_steps + 20, 15, 15
    with watched(device) as rings:
        engine = engine_of(scale.large, device)
        add_adamw(engine)
        hooks = rings.watch(engine)
        batches = [micro_batch(scale.large, seed) for seed in range(2)]

        def steps(count: int) -> list[MicroBatchRecord]:
            found = []
            for _ in range(count):
                engine.step(batches)
                synchronize(device)
                found += rings.records()
            return found

        alone = steps(healthy)
        probes = [_probe(device, scale)]
        other = subprocess.Popen(
            [sys.executable, "-c", _COMPETITOR, str(scale.matrix // 2), str(device)],
            stdout=subprocess.PIPE,
        )
        try:
            assert other.stdout is not None, "a pipe"
            require(other.stdout.readline() == b"computes\n", "the other process did not start")
            time.sleep(scale.load_s / 3)
            beside = steps(disturbed)
            probes.append(_probe(device, scale))
        finally:
            other.kill()
            other.wait()
        time.sleep(scale.load_s / 3)
        back = steps(after)
        hooks.detach()
        back += rings.records()
    alone_s, beside_s = (
        float(np.median([r.compute_s for r in some if r.step > 2])) for some in (alone, beside)
    )
    said = _judge(config, [*alone, *beside, *back], alone[2 * len(batches) :])
    named = next(((step, found) for step, found in said.named if step >= healthy), None)
    recovered = next((step for step in said.recovered if step >= healthy + disturbed), None)
    return Contention(
        healthy_steps=healthy,
        disturbed_steps=disturbed,
        alone_ms=alone_s * 1e3,
        beside_ms=beside_s * 1e3,
        factor=beside_s / alone_s,
        false_findings=sum(step < healthy for step, _ in said.named),
        found_after_steps=None if named is None else named[0] - healthy + 1,
        found_slowdown=None if named is None else named[1],
        recovered_after_steps=None if recovered is None else recovered - healthy - disturbed + 1,
        product_factor=probes[1][0] / probes[0][0],
        copy_factor=probes[1][1] / probes[0][1],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """Steps with findings, and their slowdown; steps with recoveries."""

    named: tuple[tuple[int, float], ...] = ()
    recovered: tuple[int, ...] = ()


def _judge(
    config: DetectorConfig,
    records: Sequence[MicroBatchRecord],
    alone: Sequence[MicroBatchRecord],
) -> _Said:
    """What the detector says of the rank, given the steps one by one.

    Args:
        config: Its settings.
        records: Of the rank.
        alone: Of the same micro-batches in health: times of the peers.
    """
    by_step: dict[int, list[MicroBatchRecord]] = {}
    source = Random(1)
    for record in records:
        alike = [one.compute_s for one in alone if one.micro_batch == record.micro_batch]
        peers = [
            replace(record, rank=rank, compute_s=source.choice(alike))
            for rank in range(1, PEERS + 1)
        ]
        by_step.setdefault(record.step, []).extend([record, *peers])
    evidence, said = begin(), _Said()
    for step in sorted(by_step):
        evidence, judgement = update_evidence(config, evidence, sample_of(by_step[step]))
        named = tuple((step, one.slowdown) for one in judgement.findings if one.rank == 0)
        recovered = (step,) if 0 in judgement.recovered else ()
        said = replace(said, named=said.named + named, recovered=said.recovered + recovered)
    return said


def _probe(device: torch.device, scale: Scale) -> tuple[float, float]:
    """Seconds of a product and of a copy, as the probe of ranks makes them."""
    side = min(_PROBE_SIDE, scale.matrix)
    one = torch.randn(side, side, device=device)
    out = torch.empty_like(one)
    source = torch.zeros(_PROBE_FLOATS if device.type == "cuda" else 1 << 16, device=device)
    target = torch.empty_like(source)
    return (
        device_s(device, lambda: torch.mm(one, one, out=out), scale.repeats),
        device_s(device, lambda: target.copy_(source), scale.repeats),
    )
