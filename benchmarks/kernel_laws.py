"""How far are the kernel laws from measured kernels, and our price model from the laws?

`python -m benchmarks.kernel_laws --data DIR`; two minutes of one core. The table of
`core.kernel_laws.laws` is fitted to half of the measured shapes of one file of `vidur_profiles`
(H100, Llama 2 70B): a shape is a kind of kernel at a degree of tensor parallelism, and every second
one is fitted to. The fit is repeated here and must give the table. Errors are told on the other
half, and on every other H100 file of the folder.

Then the price model of the predictor is fitted to times that the laws give for micro-batches of
Qwen3-30B-A3B, and judged on later ones: in place, with as many rows as before, and after a move,
with others, on long rows that fill the device and on short ones at its knees. Last line: JSON.
"""

import argparse
import csv
import gzip
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import least_squares

from benchmarks.predictor_error import documents, read_lengths
from pacekeeper.core.errors import DataError
from pacekeeper.core.kernel_laws.kernels import (
    Attention,
    Kernel,
    Product,
    Stream,
    StreamKind,
    backward,
)
from pacekeeper.core.kernel_laws.laws import (
    ATTENTION_TILE,
    H100,
    AttentionLaw,
    Device,
    ProductLaw,
    StreamLaw,
    kernel_s,
    time_s,
)
from pacekeeper.core.kernel_laws.noise import DEVICE_NOISE, NO_NOISE, Noise, NoiseLaw
from pacekeeper.core.telemetry.expert_row_features import rows_over
from pacekeeper.core.telemetry.records import MicroBatchRecord
from pacekeeper.predictor.cost.features import BENDS, Array, sample_of
from pacekeeper.predictor.cost.model import fit
from pacekeeper.trainer.emulation.model_kernels import model_kernels
from pacekeeper.trainer.model.skeleton import build_skeleton

FITTED_FILE = "h100_Llama-2-70b-hf_mlp.csv.gz"
THINNED = 6  # of the token counts of a fitted shape, every so many-th
TICK_S, LEAST_TICKS, JUDGED_TICKS = 1e-6, 3, 10  # of the measurements
MOST_APART = 0.02  # of the fit of today and the table
STREAMS = {  # by kind: column of the measurement, and of one to judge by only
    StreamKind.NORM: ("input_layernorm", "post_attention_layernorm"),
    StreamKind.ACTIVATION: ("mlp_act",),
    StreamKind.ADD: ("add",),
    StreamKind.ROTARY: ("attn_rope",),
    StreamKind.EMBEDDING: ("emb",),
}
# FlashAttention-3, arXiv:2407.08608, figures 5 and 6: TFLOPS by length, 16,384 tokens, 16 heads.
FORWARD_CAUSAL = {512: 292, 1024: 423, 2048: 521, 4096: 579, 8192: 602, 16384: 616}
BACKWARD_FULL = {512: 316, 1024: 424, 2048: 501, 4096: 542, 8192: 559, 16384: 561}
# https://huggingface.co/Qwen/Qwen3-30B-A3B, config.json; of its 48 layers a stage of 12.
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
EXPERTS, TOP_K, RANKS = 128, 8, 8
ROW_TOKENS = {"long rows": 2048, "short rows": 160}
MICRO_BATCHES, FIT_STEPS, JUDGED_STEPS = 2, 24, 24


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measured kernel: median seconds; `is_fitted`: of the half that the table is fitted to."""

    kernel: Kernel
    seconds: float
    is_fitted: bool


def measurements(path: Path) -> list[Measurement]:
    """The products and streams of one file of Vidur; what took less than its clock's resolution
    times `LEAST_TICKS` is left out."""
    found = []
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            parts = int(row["num_tensor_parallel_workers"])
            for number, (column, kernel) in enumerate(_kernels(row, parts)):
                seconds = float(row[f"time_stats.{column}.median"]) * 1e-3
                is_even = (number + parts.bit_length()) % 2 == 1
                is_fitted = path.name == FITTED_FILE and is_even and column[:4] != "post"
                if seconds >= LEAST_TICKS * TICK_S:
                    found.append(Measurement(kernel, seconds, is_fitted))
    return found


def _kernels(row: Mapping[str, str], parts: int) -> Iterator[tuple[str, Kernel]]:
    tokens, hidden, inner = (int(row[n]) for n in ("num_tokens", "n_embd", "n_expanded_embd"))
    heads, groups = int(row["n_head"]), int(row["n_kv_head"])
    size = hidden // heads
    yield "attn_pre_proj", Product(tokens, hidden, (heads + 2 * groups) * size // parts)
    yield "attn_post_proj", Product(tokens, hidden // parts, hidden)
    yield "mlp_up_proj", Product(tokens, hidden, 2 * inner // parts)
    yield "mlp_down_proj", Product(tokens, inner // parts, hidden)
    elements = {  # read and written, of a token
        StreamKind.NORM: 2 * hidden,
        StreamKind.ACTIVATION: 3 * inner // parts,
        StreamKind.ADD: 3 * hidden,
        StreamKind.ROTARY: 2 * (heads + groups) * size // parts,
        StreamKind.EMBEDDING: 2 * hidden,
    }
    for kind, columns in STREAMS.items():
        for column in columns:
            yield column, Stream(kind, 2 * tokens * elements[kind])


def fit_products(measured: Sequence[Measurement]) -> ProductLaw:
    """Least squares of log errors, robust: what a library chose badly is no law."""
    chosen = [one for one in measured if one.is_fitted and isinstance(one.kernel, Product)]
    chosen = chosen[::THINNED]
    tiles = list(H100.product.tile_flops_per_s)
    start = [*(4.0 for _ in tiles), 3.0, 2.5, 3.0, 1.0]

    def law(logs: Array) -> ProductLaw:
        values = np.exp(logs)
        return ProductLaw(
            tile_flops_per_s=dict(zip(tiles, (values[:-4] * 1e12).tolist(), strict=True)),
            floor_s=float(values[-4]) * 1e-6,
            bytes_per_s=float(values[-3]) * 1e12,
            overlap=float(1.0 + values[-2]),
            split_s_per_byte=float(values[-1]) * 1e-13,
        )

    def errors(logs: Array) -> Array:
        device = replace(H100, product=law(logs))
        return np.array([np.log(kernel_s(one.kernel, device) / one.seconds) for one in chosen])

    found = least_squares(errors, np.log(start), loss="soft_l1", f_scale=0.05, diff_step=1e-3)
    return law(found.x)


def fit_stream(measured: Sequence[Measurement], kind: StreamKind) -> StreamLaw:
    """As `fit_products`, of one kind."""
    chosen = [
        one
        for one in measured
        if one.is_fitted and isinstance(one.kernel, Stream) and one.kernel.kind is kind
    ]

    def law(logs: Array) -> StreamLaw:
        floor, cached, size, beyond = np.exp(logs).tolist()
        return StreamLaw(
            floor_s=floor * 1e-6,
            cached_bytes_per_s=cached * 1e12,
            cached_bytes=size * 1e7,
            bytes_per_s=beyond * 1e12,
        )

    def errors(logs: Array) -> Array:
        device = replace(H100, streams={kind: law(logs)})
        return np.array([np.log(kernel_s(one.kernel, device) / one.seconds) for one in chosen])

    start = np.log([10.0, 2.0, 3.0, 1.5])
    found = least_squares(errors, start, loss="soft_l1", f_scale=0.05, diff_step=1e-3)
    return law(found.x)


def fit_attention(published: Mapping[int, int], is_backward: bool) -> AttentionLaw:
    """The speed and overhead by which the published speeds are met best."""

    def law(logs: Array) -> AttentionLaw:
        speed, overhead = np.exp(logs).tolist()
        return AttentionLaw(flops_per_s=speed * 1e14, overhead_tiles=overhead)

    def errors(logs: Array) -> Array:
        return np.array(
            [np.log(e) for e in attention_ratios(published, law(logs), is_backward).values()]
        )

    return law(least_squares(errors, np.log([6.0, 2.0])).x)


def attention_ratios(
    published: Mapping[int, int], law: AttentionLaw, is_backward: bool
) -> dict[int, float]:
    """By length, the law's time over the published one; the backward pass is not causal there."""
    device = replace(H100, attention=law, attention_backward=law)
    found = {}
    for length, speed in published.items():
        count, heads, tiles = 16384 // length, 16, length // ATTENTION_TILE
        flops = 4.0 * length * length * 128 * count * heads
        if is_backward:
            unit_s = 10.0 * ATTENTION_TILE**2 * 128 / (law.flops_per_s / H100.num_units)
            dealt = count * heads * tiles * (tiles + law.overhead_tiles) / H100.num_units
            seconds = H100.product.floor_s + unit_s * (dealt + tiles / 2)
            found[length] = seconds * speed * 1e12 / (2.5 * flops)
        else:
            seconds = kernel_s(Attention((length,) * count, heads, 128), device)
            found[length] = seconds * speed * 1e12 / (flops / 2.0)
    return found


def errors_of(measured: Sequence[Measurement], device: Device) -> dict[str, float]:
    """Median and 95 % of the relative error."""
    judged = [one for one in measured if one.seconds >= JUDGED_TICKS * TICK_S]
    off = [abs(kernel_s(one.kernel, device) / one.seconds - 1.0) for one in judged]
    return {
        "kernels": len(off),
        "median": round(float(np.median(off)), 4),
        "p95": round(float(np.quantile(off, 0.95)), 4),
    }


def numbers(device: Device) -> dict[str, list[float]]:
    """By law, the numbers of the table that are fitted."""
    laws: dict[str, ProductLaw | StreamLaw | AttentionLaw] = {
        "product": device.product,
        **{str(kind): law for kind, law in device.streams.items()},
        "attention": device.attention,
        "attention_backward": device.attention_backward,
    }
    found = {}
    for name, law in laws.items():
        values = [getattr(law, field.name) for field in fields(law)]
        tiles = [v for value in values if isinstance(value, dict) for v in value.values()]
        found[name] = tiles + [value for value in values if not isinstance(value, dict)]
    return found


def refit(measured: Sequence[Measurement]) -> Device:
    """The device by the measurements and the published speeds."""
    return replace(
        H100,
        product=fit_products(measured),
        streams={kind: fit_stream(measured, kind) for kind in StreamKind},
        attention=fit_attention(FORWARD_CAUSAL, is_backward=False),
        attention_backward=fit_attention(BACKWARD_FULL, is_backward=True),
    )


class Microbatches:
    """Records of a job of Qwen3-30B-A3B: real document lengths, skewed and drifting routing."""

    def __init__(self, lengths: list[int], row_tokens: int, noise: NoiseLaw, seed: int) -> None:
        skeleton = build_skeleton(QWEN3_30B_A3B)
        self._kernels = model_kernels(skeleton, skeleton)
        self._layers = len(self._kernels.experts)
        self._documents = documents(lengths, row_tokens, Random(seed))
        self._row_tokens = row_tokens
        sources = [Random(seed * RANKS + rank) for rank in range(RANKS)]
        self._noise = [
            Noise(noise, normal=partial(one.gauss, 0.0, 1.0), uniform=one.random) for one in sources
        ]
        self._rng = np.random.default_rng(seed)
        self._appeal = self._rng.normal(0.0, 0.5, (self._layers, EXPERTS))  # logs

    def step(self, step: int, rows: Sequence[int]) -> list[MicroBatchRecord]:
        """One step in which each rank computes so many rows in each of its micro-batches."""
        self._appeal *= 0.995
        self._appeal += self._rng.normal(0.0, 0.5 * (1.0 - 0.995**2) ** 0.5, self._appeal.shape)
        weight = np.exp(self._appeal)
        part = weight / weight.sum(axis=1, keepdims=True)
        records = []
        for number in range(MICRO_BATCHES):
            total = sum(rows) * self._row_tokens * TOP_K
            routed = np.stack([self._rng.multinomial(total, layer) for layer in part])
            for rank in range(RANKS):
                own = [n for _ in range(rows[rank]) for n in next(self._documents)]
                here = routed.reshape(self._layers, RANKS, -1)[:, rank].tolist()
                records.append(self._record(step, number, rank, tuple(own), here))
        return records

    def _record(
        self, step: int, number: int, rank: int, lengths: tuple[int, ...], rows: list[list[int]]
    ) -> MicroBatchRecord:
        forward = [k for one in self._kernels.modules.values() for k in one.forward(lengths)]
        for experts, own in zip(self._kernels.experts.values(), rows, strict=True):
            forward += experts.forward(own)
        seconds = sum(time_s(k) + sum(map(time_s, backward(k))) for k in forward)
        counts = [n for own in rows for n in own]
        return MicroBatchRecord(
            rank=rank,
            step=step,
            micro_batch=number,
            generation=1,
            compute_s=seconds * self._noise[rank].next(),
            tokens=sum(lengths),
            sum_len_squared=sum(n * n for n in lengths),
            expert_rows=sum(counts),
            num_active_experts=sum(n > 0 for n in counts),
            **dict(zip(BENDS, rows_over(counts), strict=True)),
            num_documents=len(lengths),
        )


def price_model_errors(
    lengths: list[int], row_tokens: int, noise: NoiseLaw
) -> dict[str, dict[str, float]]:
    """The relative error of the price model on steps that it was not fitted to.

    In place: all ranks compute as many rows as while it was fitted. Moved: from a quarter of them
    to nearly twice as many. Learnt: moved as before, the model fitted to as many such steps beside
    the first, in which other ranks had more.
    """
    job = Microbatches(lengths, row_tokens, noise, seed=1)
    even, moved = [4] * RANKS, [1, 2, 3, 4, 4, 5, 6, 7]
    history = [sample_of(job.step(step, even)) for step in range(FIT_STEPS)]
    model, found = fit(history), {}
    for name, rows in (("in_place", even), ("moved", moved), ("learnt", moved)):
        if name == "learnt":
            model = fit(history + [sample_of(job.step(s, moved[::-1])) for s in range(FIT_STEPS)])
        samples = [sample_of(job.step(FIT_STEPS + n, rows)) for n in range(JUDGED_STEPS)]
        for unit in ("step", "micro_batch"):
            pairs = [(s.features, s.observed_s) for s in samples]
            if unit == "micro_batch":
                pairs = [(s.parts.features, s.parts.observed_s) for s in samples if s.parts]
            off = np.concatenate([np.ravel(model.expected_s(x) / y - 1.0) for x, y in pairs])
            found[f"{name}_{unit}"] = {
                "bias": round(float(np.median(off)), 4),
                "median": round(float(np.median(np.abs(off))), 4),
                "p95": round(float(np.quantile(np.abs(off), 0.95)), 4),
            }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    arguments = parser.parse_args()
    paths = sorted((arguments.data / "vidur_profiles").glob("h100_*_mlp.csv.gz"))
    if FITTED_FILE not in [path.name for path in paths]:
        raise DataError(f"{arguments.data}/vidur_profiles has no {FITTED_FILE}")
    measured = {path.name: measurements(path) for path in paths}
    fitted = measured.pop(FITTED_FILE)
    console = Console(width=100)
    again = numbers(refit(fitted))
    apart = max(
        abs(value / other - 1.0)
        for name, own in numbers(H100).items()
        for value, other in zip(own, again[name], strict=True)
    )
    parts = {
        "fitted half": [one for one in fitted if one.is_fitted],
        "other half": [one for one in fitted if not one.is_fitted],
        **measured,
    }
    rows = {
        f"{name}, {kind.__name__.lower()}s": errors_of(
            [one for one in part if isinstance(one.kernel, kind)], H100
        )
        for name, part in parts.items()
        for kind in (Product, Stream)
    }
    show(console, "laws against measured kernels: relative error", rows)
    attention = {
        "forward": attention_ratios(FORWARD_CAUSAL, H100.attention, is_backward=False),
        "backward": attention_ratios(BACKWARD_FULL, H100.attention_backward, is_backward=True),
    }
    (path, *_) = sorted((arguments.data / "llm_lengths").glob("repository_documents*.csv.gz"))
    noises = {"no noise": NO_NOISE, "noise": DEVICE_NOISE}
    prices = {
        f"{rows}, {noise}": price_model_errors(
            read_lengths(path, "gpt2_tokens", tokens), tokens, noises[noise]
        )
        for rows, tokens in ROW_TOKENS.items()
        for noise in noises
    }
    for name, errors in prices.items():
        show(console, f"price model against the laws, {name}", errors)
    print(
        json.dumps(
            {
                "table_apart_from_the_fit": round(apart, 4),
                "laws": rows,
                "attention_worst": round(
                    max(abs(r - 1.0) for each in attention.values() for r in each.values()), 4
                ),
                "price_model": prices,
            }
        )
    )
    return 0 if apart < MOST_APART else 1


def show(console: Console, title: str, rows: Mapping[str, Mapping[str, float]]) -> None:
    """A table with the columns of the first row."""
    columns = list(next(iter(rows.values())))
    table = Table(title=title)
    for column in ("", *columns):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        table.add_row(name, *(f"{row[c]:.2%}" if c != "kernels" else str(row[c]) for c in columns))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
