"""How well is a micro-batch's compute time predicted? Ours, ResiHP's formula and scikit-learn's.

`python -m benchmarks.predictor_error --data DIR`; five minutes of one core. Real arithmetic,
forward and backward, on documents of real lengths (`llm_lengths`) packed to a token budget with
block-diagonal attention; dense, and MoE with a rank that holds half of the experts under skewed and
drifting routing. An iteration is several micro-batches and the optimizer's work. All models are
fitted to the first measurement of 40 % of the iterations and predict the others: the first ones
(`ratio_*`), and random ones again and again, for an interval (`splits_*`: mean, 2.5 %, 97.5 %).

The clock has noise of its own (other processes share caches and cores), which no model predicts. So
each iteration is computed several times, in passes of random order with frozen weights, and all is
told twice: `raw`, fitted to and judged by the first measurement, and `denoised`, fitted to and
judged by the least of all passes (what disturbs only ever adds). What a second measurement is off
by from the first is printed beside: what noise alone does.

ResiHP: T = alpha N + beta sum(l^2), least squares (research: eq. 1); their own error on GPUs:
1.19-1.58 % per micro-batch, 2.81-5.06 % per iteration. Last line: JSON with the ratios, and the
seconds that a fit for 10,000 ranks takes the detector with each regressor in its settings.
"""

import argparse
import csv
import gzip
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from pacekeeper.core.errors import DataError
from pacekeeper.core.telemetry.expert_row_features import rows_over
from pacekeeper.core.telemetry.records import MicroBatchRecord
from pacekeeper.predictor.cost.features import (
    BENDS,
    FEATURES,
    Array,
    Positions,
    StepSample,
    sample_of,
)
from pacekeeper.predictor.cost.model import CostModel, fit
from pacekeeper.predictor.cost.named_regressor import regressor_factory

# Of files named so: the column of their lengths, and what their run is called.
LENGTHS = {
    "repository_documents": ("gpt2_tokens", "repository documents"),
    "azure2023_conv": ("ContextTokens", "conversations"),
    "azure2023_code": ("ContextTokens", "code"),
}
EXPERTS, TOP_K = 16, 2
MICRO_BATCHES = 4  # of an iteration
WARM_UP = 3  # iterations
FIT_SHARE = 0.4  # of the iterations
NAMED = {
    "huber": "sklearn.linear_model.HuberRegressor(max_iter=5000)",
    "hist_gradient_boosting": "sklearn.ensemble.HistGradientBoostingRegressor(min_samples_leaf=5)",
    "gradient_boosting": "sklearn.ensemble.GradientBoostingRegressor(max_depth=2)",
}
RIVALS = ("resihp", *NAMED)
FLEET_RANKS, FLEET_STEPS = 10_000, 12  # of the fit that is timed: a warm-up
ERRORS = ("raw_micro_batch", "raw_iteration", "denoised_micro_batch", "denoised_iteration")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What fills one core, or one GPU, so that its clock sees work and not the start of kernels."""

    hidden: int
    heads: int
    layers: int
    budget: int  # tokens of a micro-batch
    dtype: torch.dtype


CORE = Size(hidden=256, heads=4, layers=1, budget=1024, dtype=torch.float32)
GPU = Size(hidden=2048, heads=16, layers=4, budget=16_384, dtype=torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The work of one micro-batch: its documents, and what routing prefers just then."""

    documents: list[int]
    bias_E: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One iteration: features [micro-batches, FEATURES], seconds by pass [passes, micro-batches]
    and of the whole [passes]."""

    features: Array
    compute_s: Array
    whole_s: Array


class Block(nn.Module):
    """Attention per document, then a dense MLP or the local half of a mixture of experts."""

    def __init__(self, size: Size, is_moe: bool) -> None:
        super().__init__()
        self.hidden, self.heads = size.hidden, size.heads
        wide = 4 * size.hidden
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden)
        self.out = nn.Linear(size.hidden, size.hidden)
        self.router = nn.Linear(size.hidden, EXPERTS) if is_moe else None
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(size.hidden, wide), nn.GELU(), nn.Linear(wide, size.hidden))
            for _ in range(EXPERTS // 2 if is_moe else 1)
        )

    def forward(self, x_TD: Tensor, case: Case) -> tuple[Tensor, list[int]]:
        """(tokens, rows of each local expert)."""
        q, k, v = (
            part.view(-1, self.heads, self.hidden // self.heads).transpose(0, 1)
            for part in self.qkv(F.rms_norm(x_TD, (self.hidden,))).chunk(3, dim=-1)
        )
        seen, at = [], 0
        for length in case.documents:
            own = slice(at, at + length)
            seen.append(
                F.scaled_dot_product_attention(q[:, own], k[:, own], v[:, own], is_causal=True)
            )
            at += length
        x_TD = x_TD + self.out(torch.cat(seen, dim=1).transpose(0, 1).reshape(-1, self.hidden))
        normed = F.rms_norm(x_TD, (self.hidden,))
        if self.router is None:
            return x_TD + self.mlps[0](normed), []
        weight_TE = torch.softmax(self.router(normed) + case.bias_E, dim=-1)
        top = weight_TE.topk(TOP_K, dim=-1)
        mixed, rows = torch.zeros_like(x_TD), []
        for expert, mlp in enumerate(self.mlps):
            token, slot = (top.indices == expert).nonzero(as_tuple=True)
            rows.append(len(token))
            if len(token):
                answer = mlp(normed.index_select(0, token)) * top.values[token, slot, None]
                mixed = mixed.index_add(0, token, answer)
        return x_TD + mixed, rows


def documents(lengths: list[int], budget: int, random: Random) -> Iterator[list[int]]:
    """Document lengths of one micro-batch after another, cut to fill the token budget."""
    while True:
        chosen, room = [], budget
        while room > 0:
            length = min(random.choice(lengths), room)
            chosen.append(length)
            room -= length
        yield chosen


def cases(lengths: list[int], size: Size, count: int, device: torch.device) -> list[Case]:
    """The micro-batches of a run; what routing prefers drifts from iteration to iteration."""
    source = documents(lengths, size.budget, Random(1))
    bias_E, made = torch.randn(EXPERTS), []
    for i in range(count):
        if i % MICRO_BATCHES == 0:
            bias_E = bias_E + 0.15 * torch.randn(EXPERTS)
        made.append(Case(documents=next(source), bias_E=bias_E.to(device, size.dtype)))
    return made


def run(
    lengths: list[int], size: Size, *, is_moe: bool, iterations: int, passes: int,
    device: torch.device,
) -> list[Measured]:  # fmt: skip
    """Compute every iteration `passes` times and measure every micro-batch each time."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(size, is_moe) for _ in range(size.layers))
    blocks = blocks.to(device, size.dtype)
    # Its work is real, its steps are not: routing must be the same in every pass.
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=0.0, weight_decay=0.0)
    work = cases(lengths, size, iterations * MICRO_BATCHES, device)
    inputs = torch.randn(size.budget, size.hidden).to(device, size.dtype)
    features = np.zeros((iterations, MICRO_BATCHES, len(FEATURES)))
    compute_s = np.zeros((iterations, passes, MICRO_BATCHES))
    whole_s = np.zeros((iterations, passes))
    random = Random(2)
    for number in range(-1, passes):  # the first only warms up allocators, caches and clocks
        order = list(range(iterations))
        random.shuffle(order)
        for i in order[: WARM_UP if number < 0 else None]:
            began_s = _clock(device)
            for j in range(MICRO_BATCHES):
                case = work[i * MICRO_BATCHES + j]
                start_s = _clock(device)
                x_TD, rows = inputs, []
                for block in blocks:
                    x_TD, own_rows = block(x_TD, case)
                    rows += own_rows
                x_TD.float().square().mean().backward()
                compute_s[i, number, j] = _clock(device) - start_s
                features[i, j] = _features(case, rows)
            optimizer.step()
            optimizer.zero_grad()
            whole_s[i, number] = _clock(device) - began_s
    return [
        Measured(features=f, compute_s=c, whole_s=w)
        for f, c, w in zip(features, compute_s, whole_s, strict=True)
    ]


def _features(case: Case, rows: list[int]) -> Array:
    """As the detector counts them, from the record that a trainer would write."""
    told = MicroBatchRecord(
        rank=0, step=0, micro_batch=0, generation=1, compute_s=1.0, tokens=sum(case.documents),
        sum_len_squared=sum(length**2 for length in case.documents), expert_rows=sum(rows),
        num_active_experts=sum(n > 0 for n in rows), num_documents=len(case.documents),
        **dict(zip(BENDS, rows_over(rows), strict=True)),
    )  # fmt: skip
    features: Array = sample_of([told]).features[0]
    return features


def _clock(device: torch.device) -> float:
    """Seconds of this core's own work, or of the device's."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.thread_time()


Predict = Callable[[Array], Array]
# Told as: the work of an iteration, the seconds of its micro-batches, and of the whole.
Told = list[tuple[Array, Array, float]]


def errors(measured: list[Measured]) -> dict[str, float]:
    """Mean absolute percentage errors on the iterations after those that were fitted to."""
    num_fit = round(len(measured) * FIT_SHARE)
    order = np.arange(len(measured))
    result = {}
    for kind in ("raw", "denoised"):
        told = told_as(kind, measured)
        for who, found in split_errors(told, order, num_fit).items():
            result[f"{who}_{kind}_micro_batch"], result[f"{who}_{kind}_iteration"] = found
        ours = _fitted(*_joined(told[:num_fit]))
        inside = [
            (least_s <= spent_s) & (spent_s <= most_s)
            for rows, spent_s, _ in told[num_fit:]
            for least_s, most_s in [ours.interval_s(rows)]
        ]
        result[f"inside_interval_{kind}"] = float(np.mean(inside))
    rest = measured[num_fit:]
    again = [np.abs(m.compute_s[1] / m.compute_s[0] - 1.0) for m in rest]
    whole_again = [abs(m.whole_s[1] / m.whole_s[0] - 1.0) for m in rest]
    result["repeat_micro_batch"] = float(np.mean(again))
    result["repeat_iteration"] = float(np.mean(whole_again))
    return result


def told_as(kind: str, measured: list[Measured]) -> Told:
    """The first measurement, or the least of all passes."""
    pick = _first if kind == "raw" else _least
    return [(m.features, pick(m.compute_s), float(pick(m.whole_s))) for m in measured]


def split_errors(told: Told, order: Positions, num_fit: int) -> dict[str, tuple[float, float]]:
    """By model: mean absolute percentage error of micro-batches, and of iterations.

    Args:
        told: the iterations.
        order: of the iterations; the first `num_fit` are fitted to.
        num_fit: how many.
    """
    fitted, rest = ([told[at] for at in part] for part in (order[:num_fit], order[num_fit:]))
    features, compute_s = _joined(fitted)
    models: dict[str, Predict] = {"ours": _fitted(features, compute_s).expected_s}
    models["resihp"] = _resihp(features, compute_s)
    models |= {who: _named(name, features, compute_s) for who, name in NAMED.items()}
    result = {}
    for who, predict in models.items():
        # What an iteration takes beyond its micro-batches is one constant, for all alike.
        beyond_s = np.median([whole - predict(rows).sum() for rows, _, whole in fitted])
        each = [np.abs(predict(rows) / spent_s - 1.0) for rows, spent_s, _ in rest]
        all_s = [(predict(rows).sum() + beyond_s, whole) for rows, _, whole in rest]
        result[who] = float(np.mean(each)), float(np.mean([abs(p / w - 1) for p, w in all_s]))
    return result


def split_ratios(
    runs: Mapping[str, list[Measured]], splits: int
) -> dict[str, tuple[float, float, float]]:
    """Our error as a part of each rival's: mean and 95 % of it over random splits."""
    rng = np.random.default_rng(3)
    result = {}
    for kind in ("dense", "MoE"):
        of_kind = [measured for name, measured in runs.items() if name.endswith(kind)]
        for sort in ("raw", "denoised"):
            found = [
                [
                    split_errors(
                        told_as(sort, measured),
                        rng.permutation(len(measured)),
                        round(len(measured) * FIT_SHARE),
                    )
                    for measured in of_kind
                ]
                for _ in range(splits)
            ]
            for rival in RIVALS:
                for at, what in enumerate(("micro_batch", "iteration")):
                    ratios = [
                        sum(run["ours"][at] for run in split) / sum(run[rival][at] for run in split)
                        for split in found
                    ]
                    low, high = np.quantile(ratios, [0.025, 0.975])
                    name = f"splits_{kind.lower()}_{sort}_{what}_{rival}"
                    result[name] = float(np.mean(ratios)), float(low), float(high)
    return result


def fit_seconds(measured: list[Measured]) -> dict[str, float]:
    """What the detector's fit to a warm-up of 10,000 ranks takes, by regressor."""
    rng = np.random.default_rng(4)
    features, compute_s = _joined(told_as("denoised", measured))
    samples = []
    for step in range(FLEET_STEPS):
        at = rng.integers(len(features), size=FLEET_RANKS)
        noise = np.exp(0.01 * rng.standard_normal(FLEET_RANKS))
        samples.append(
            StepSample(
                step=step,
                generation=1,
                ranks=tuple(range(FLEET_RANKS)),
                features=features[at],
                observed_s=compute_s[at] * noise,
            )
        )
    result = {}
    for who, name in {"ours": "", **NAMED}.items():
        if name:
            regressor_factory(name)  # its import is no part of a fit
        began_s = time.perf_counter()
        fit(samples, name)
        result[who] = time.perf_counter() - began_s
    return result


def _joined(told: Told) -> tuple[Array, Array]:
    """Work [micro-batches, FEATURES] and seconds [micro-batches] of all iterations."""
    return (
        np.concatenate([rows for rows, _, _ in told]),
        np.concatenate([spent_s for _, spent_s, _ in told]),
    )


def _fitted(features: Array, compute_s: Array) -> CostModel:
    """Our model: features [micro-batches, FEATURES], seconds [micro-batches]."""
    return fit(
        [
            StepSample(step=i, generation=1, ranks=(0,), features=row[None], observed_s=spent)
            for i, (row, spent) in enumerate(zip(features, compute_s[:, None], strict=True))
        ]
    )


def _named(name: str, features: Array, compute_s: Array) -> Predict:
    """A regressor of scikit-learn, given what the detector would give it."""
    scale = np.maximum(features.mean(axis=0), 1e-12)
    typical_s = float(np.median(compute_s))
    regressor = regressor_factory(name)()
    regressor.fit(features / scale, compute_s / typical_s)

    def predict(rows: Array) -> Array:
        expected_s: Array = regressor.predict(rows / scale) * typical_s
        return expected_s

    return predict


def _resihp(features: Array, compute_s: Array) -> Predict:
    """T = alpha N + beta sum(l^2), least squares."""
    columns = [FEATURES.index("tokens"), FEATURES.index("sum_len_squared")]
    coefficients, *_ = np.linalg.lstsq(features[:, columns], compute_s, rcond=None)

    def predict(rows: Array) -> Array:
        expected_s: Array = rows[:, columns] @ coefficients
        return expected_s

    return predict


def _first(passes: Array) -> Array:
    first: Array = passes[0]
    return first


def _least(passes: Array) -> Array:
    least: Array = np.min(passes, axis=0)
    return least


def documents_in(folder: Path) -> list[tuple[str, Path, str]]:
    """Name, file and column of each kind that is there. Raises DataError where there is none."""
    found = [
        (name, path, column)
        for start, (column, name) in LENGTHS.items()
        for path in sorted(folder.glob(f"{start}*.csv.gz"))
    ]
    if not found:
        raise DataError(f"{folder}: no lengths", remedy=f"expected {', '.join(LENGTHS)}*.csv.gz")
    return found


def read_lengths(path: Path, column: str, limit: int) -> list[int]:
    """Lengths in tokens, those above `limit` cut to it."""
    with gzip.open(path, "rt") as file:
        found = [int(float(row[column])) for row in csv.DictReader(file)]
    return [min(max(length, 8), limit) for length in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument(
        "--passes", type=int, default=3, help="how often each is computed, 2 or more"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--splits", type=int, default=20, help="random ones, for the interval")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    size = GPU if device.type == "cuda" else CORE
    if device.type == "cpu":
        torch.set_num_threads(1)
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    runs: dict[str, list[Measured]] = {}
    for name, path, column in documents_in(arguments.data / "llm_lengths"):
        lengths = read_lengths(path, column, size.budget)
        for kind in ("dense", "MoE"):
            runs[f"{name}, {kind}"] = run(
                lengths, size, is_moe=kind == "MoE", iterations=arguments.iterations,
                passes=arguments.passes, device=device,
            )  # fmt: skip
    found = {name: errors(measured) for name, measured in runs.items()}
    splits = split_ratios(runs, arguments.splits)
    fit_s = fit_seconds(next(measured for name, measured in runs.items() if "MoE" in name))
    console = Console()
    console.print(_table(found, device.type))
    console.print(_splits_table(splits, fit_s))
    print(
        json.dumps(
            {"device": device.type, "runs": found, **_ratios(found), **splits, "fit_s": fit_s}
        )
    )
    return 0


def _ratios(runs: dict[str, dict[str, float]]) -> dict[str, float]:
    """Our error as a part of theirs, in the mean over the documents, by model."""
    return {
        f"ratio_{kind.lower()}_{what}": float(
            np.mean([found[f"ours_{what}"] for name, found in runs.items() if name.endswith(kind)])
            / np.mean(
                [found[f"resihp_{what}"] for name, found in runs.items() if name.endswith(kind)]
            )
        )
        for kind in ("dense", "MoE")
        for what in ERRORS
    }


def _table(runs: dict[str, dict[str, float]], device: str) -> Table:
    table = Table(title=f"mean absolute error on {device}, micro-batch / iteration")
    names = (
        "run",
        "measured",
        "ours",
        "ResiHP's formula",
        "ratio",
        "measured again",
        "inside 95 %",
    )
    for name in names:
        table.add_column(name)
    for run_name, found in runs.items():
        for kind in ("raw", "denoised"):
            by_who = {
                who: [found[f"{who}_{kind}_{what}"] for what in ("micro_batch", "iteration")]
                for who in ("ours", "resihp")
            }
            ratios = np.divide(by_who["ours"], by_who["resihp"])
            again = f"{found['repeat_micro_batch']:.2%} / {found['repeat_iteration']:.2%}"
            is_raw = kind == "raw"
            table.add_row(
                run_name if is_raw else "",
                kind,
                *(f"{each[0]:.2%} / {each[1]:.2%}" for each in by_who.values()),
                f"{ratios[0]:.2f} / {ratios[1]:.2f}",
                again if is_raw else "",
                f"{found[f'inside_interval_{kind}']:.0%}",
            )
    return table


def _splits_table(
    splits: Mapping[str, tuple[float, float, float]], fit_s: Mapping[str, float]
) -> Table:
    table = Table(
        "model, measured", *RIVALS,
        title="our error over theirs, of micro-batches: mean (95 %) over random splits",
    )  # fmt: skip
    for kind in ("dense", "moe"):
        for sort in ("raw", "denoised"):
            cells = [splits[f"splits_{kind}_{sort}_micro_batch_{rival}"] for rival in RIVALS]
            table.add_row(
                f"{kind}, {sort}", *(f"{m:.2f} ({low:.2f}-{high:.2f})" for m, low, high in cells)
            )
    others = (f"{fit_s[who]:.2f} s" if who in fit_s else "" for who in RIVALS)
    table.add_row(f"fit, {FLEET_RANKS:,} ranks; ours {fit_s['ours']:.2f} s", *others)
    return table


if __name__ == "__main__":
    sys.exit(main())
