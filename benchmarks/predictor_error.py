"""How well is a micro-batch's compute time predicted? Ours against ResiHP's formula, same runs.

`python -m benchmarks.predictor_error --data DIR`; about two minutes on one core. Real arithmetic,
forward and backward, on documents of real lengths (`llm_lengths`) packed to a token budget with
block-diagonal attention; dense, and MoE with a rank that holds half of the experts under skewed and
drifting routing. Both models are fitted to the first micro-batches and predict the rest. An
iteration is several micro-batches and the optimizer. ResiHP: T = alpha N + beta sum(l^2), least
squares (research: eq. 1); their own error on GPUs: 1.19-1.58 % per micro-batch, 2.81-5.06 % per
iteration. Last line: JSON.
"""

import argparse
import csv
import gzip
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from pacekeeper.predictor.cost_model import fit
from pacekeeper.predictor.workload import Array, StepSample

LENGTHS = {
    "repository documents": ("repository_documents_gpt2_tokens.csv.gz", "gpt2_tokens"),
    "conversations": ("azure2023_conv.csv.gz", "ContextTokens"),
}
HIDDEN, HEADS, LAYERS, EXPERTS, TOP_K = 256, 4, 2, 8, 2
MICRO_BATCHES = 4  # of an iteration
FIT_SHARE = 0.4  # of the iterations


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One iteration: features [micro-batches, 5] as the detector counts them, and seconds."""

    features: Array
    compute_s: Array
    whole_s: float


class Block(nn.Module):
    """Attention per document, then a dense MLP or the local half of a mixture of experts."""

    def __init__(self, is_moe: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS) if is_moe else None
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))
            for _ in range(EXPERTS // 2 if is_moe else 1)
        )

    def forward(self, x_TD: Tensor, lengths: list[int], bias_E: Tensor) -> tuple[Tensor, int, int]:
        """(tokens, rows that local experts computed, experts that had any)."""
        q, k, v = (
            part.view(-1, HEADS, HIDDEN // HEADS).transpose(0, 1)
            for part in self.qkv(F.rms_norm(x_TD, (HIDDEN,))).chunk(3, dim=-1)
        )
        seen, at = [], 0
        for length in lengths:
            own = slice(at, at + length)
            seen.append(
                F.scaled_dot_product_attention(q[:, own], k[:, own], v[:, own], is_causal=True)
            )
            at += length
        x_TD = x_TD + self.out(torch.cat(seen, dim=1).transpose(0, 1).reshape(-1, HIDDEN))
        if self.router is None:
            return x_TD + self.mlps[0](F.rms_norm(x_TD, (HIDDEN,))), 0, 0
        normed = F.rms_norm(x_TD, (HIDDEN,))
        weight_TE = torch.softmax(self.router(normed) + bias_E, dim=-1)
        top = weight_TE.topk(TOP_K, dim=-1)
        mixed, rows, active = torch.zeros_like(x_TD), 0, 0
        for expert, mlp in enumerate(self.mlps):
            token, slot = (top.indices == expert).nonzero(as_tuple=True)
            if len(token):
                answer = mlp(normed.index_select(0, token)) * top.values[token, slot, None]
                mixed = mixed.index_add(0, token, answer)
                rows, active = rows + len(token), active + 1
        return x_TD + mixed, rows, active


def documents(lengths: list[int], budget: int, random: Random) -> Iterator[list[int]]:
    """Document lengths of one micro-batch after another, cut to fill the token budget."""
    while True:
        chosen, room = [], budget
        while room > 0:
            length = min(random.choice(lengths), room)
            chosen.append(length)
            room -= length
        yield chosen


def run(
    lengths: list[int], *, is_moe: bool, budget: int, num_iterations: int, device: torch.device
) -> list[Measured]:
    """Train a while and measure every micro-batch."""
    torch.manual_seed(0)
    random = Random(1)
    blocks = nn.ModuleList(Block(is_moe) for _ in range(LAYERS)).to(device)
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-4)
    source = documents(lengths, budget, random)
    bias_E = torch.randn(EXPERTS, device=device)
    measured = []
    for _ in range(num_iterations):
        bias_E = bias_E + 0.15 * torch.randn(EXPERTS, device=device)  # routing drifts
        rows, spent = [], []
        began_s = _clock(device)
        for _ in range(MICRO_BATCHES):
            docs = next(source)
            x_TD = torch.randn(budget, HIDDEN, device=device)
            start_s = _clock(device)
            expert_rows, active = 0, 0
            for block in blocks:
                x_TD, own_rows, own_active = block(x_TD, docs, bias_E)
                expert_rows, active = expert_rows + own_rows, active + own_active
            x_TD.square().mean().backward()
            spent.append(_clock(device) - start_s)
            squares = sum(length**2 for length in docs)
            rows.append([1.0, budget, squares, expert_rows, active])
        optimizer.step()
        optimizer.zero_grad()
        measured.append(
            Measured(
                features=np.array(rows, dtype=np.float64),
                compute_s=np.array(spent),
                whole_s=_clock(device) - began_s,
            )
        )
    return measured[2:]  # allocators and caches warm up


def _clock(device: torch.device) -> float:
    """Seconds of this core's own work, or of the device's."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.thread_time()


def errors(measured: list[Measured]) -> dict[str, float]:
    """Mean absolute percentage errors on the iterations that were not fitted to."""
    num_fit = round(len(measured) * FIT_SHARE)
    fitted, rest = measured[:num_fit], measured[num_fit:]
    samples = [
        StepSample(
            step=i * MICRO_BATCHES + j, generation=1, ranks=(0,), features=m.features[j : j + 1],
            observed_s=m.compute_s[j : j + 1],
        )
        for i, m in enumerate(fitted)
        for j in range(MICRO_BATCHES)
    ]  # fmt: skip
    model = fit(samples)
    features = np.concatenate([m.features for m in fitted])
    observed_s = np.concatenate([m.compute_s for m in fitted])
    resihp, *_ = np.linalg.lstsq(features[:, [1, 2]], observed_s, rcond=None)
    result = {}
    for name, predict in (
        ("ours", model.expected_s),
        ("resihp", lambda rows: rows[:, [1, 2]] @ resihp),
    ):
        # What an iteration takes beyond its micro-batches is one constant, for both alike.
        beyond_s = np.median([m.whole_s - predict(m.features).sum() for m in fitted])
        each = [np.abs(predict(m.features) / m.compute_s - 1.0) for m in rest]
        whole = [abs((predict(m.features).sum() + beyond_s) / m.whole_s - 1.0) for m in rest]
        result[f"{name}_micro_batch"] = float(np.mean(np.concatenate(each)))
        result[f"{name}_iteration"] = float(np.mean(whole))
    return result


def read_lengths(path: Path, column: str, limit: int) -> list[int]:
    """Lengths in tokens, those above `limit` cut to it."""
    with gzip.open(path, "rt") as file:
        found = [int(float(row[column])) for row in csv.DictReader(file)]
    return [min(max(length, 8), limit) for length in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--iterations", type=int, default=42)
    parser.add_argument("--budget", type=int, default=1536, help="tokens of a micro-batch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    table = Table(title=f"mean absolute error on {device.type}, micro-batch / iteration")
    for name in ("documents", "model", "ours", "ResiHP's formula", "ratio (ours / theirs)"):
        table.add_column(name)
    outcome: dict[str, object] = {"device": device.type, "runs": {}}
    ratios = []
    for name, (file, column) in LENGTHS.items():
        lengths = read_lengths(arguments.data / "llm_lengths" / file, column, arguments.budget)
        for is_moe in (False, True):
            found = errors(
                run(
                    lengths,
                    is_moe=is_moe,
                    budget=arguments.budget,
                    num_iterations=arguments.iterations,
                    device=device,
                )
            )
            kind = "MoE" if is_moe else "dense"
            assert isinstance(outcome["runs"], dict)
            outcome["runs"][f"{name}, {kind}"] = found
            ratio = [
                found[f"ours_{what}"] / found[f"resihp_{what}"]
                for what in ("micro_batch", "iteration")
            ]
            ratios.append(ratio)
            table.add_row(
                name,
                kind,
                *(
                    f"{found[f'{who}_micro_batch']:.2%} / {found[f'{who}_iteration']:.2%}"
                    for who in ("ours", "resihp")
                ),
                f"{ratio[0]:.2f} / {ratio[1]:.2f}",
            )  # fmt: skip
    outcome["ratio_micro_batch"] = float(np.median([ratio[0] for ratio in ratios]))
    outcome["ratio_iteration"] = float(np.median([ratio[1] for ratio in ratios]))
    Console().print(table)
    print(json.dumps(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main())
