"""What the sections share: sizes, events of a device, times of interleaved pairs.

Nothing here needs transformers; `models.py` has engines and process groups.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import comb
from typing import Any

import torch
from torch import Tensor

from pacekeeper.trainer.groups.devices import new_event as cuda_event


class NotRun(Exception):
    """A section cannot run here; the message says why."""


def figure(what: str) -> Any:
    """Return a field of a dataclass of figures; `what`: its meaning and unit, for the page."""
    return field(metadata={"what": what})


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A Qwen3-MoE, and the micro-batches that it is given."""

    hidden: int
    layers: int
    heads: int
    head_size: int
    experts: int
    chosen: int
    inner: int
    vocabulary: int
    rows: int
    row_tokens: int

    @property
    def config(self) -> dict[str, Any]:
        """The content of its config.json."""
        return {
            "model_type": "qwen3_moe",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": max(self.heads // 4, 1),
            "head_dim": self.head_size,
            "num_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "moe_intermediate_size": self.inner,
            "intermediate_size": 2 * self.hidden,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
        }

    @property
    def flops_per_token(self) -> float:
        """Multiplications and additions of a forward and a backward pass, without attention."""
        attention = 2 * self.hidden * self.head_size * (self.heads + max(self.heads // 4, 1))
        experts = self.chosen * 3 * self.hidden * self.inner
        return 6.0 * (self.layers * (attention + experts) + self.hidden * self.vocabulary)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much the sections compute.

    Attributes:
        small: A model whose kernels are short: the host that starts them is the limit.
        large: A model that fills a GPU.
        steps: Of a training.
        pairs: Of interleaved measurements.
        matrix: Size of the square matrices of products and copies.
        grouped: Experts, rows, inputs and outputs of the grouped products, by name.
        shapes: Rows and tokens of a row of the micro-batches that the price model is judged by.
        repeats: Measurements of each of them.
        load_s: Seconds for which a device is kept busy.
    """

    small: Size
    large: Size
    steps: int
    pairs: int
    matrix: int
    grouped: dict[str, tuple[int, int, int, int]]
    shapes: tuple[tuple[int, int], ...]
    repeats: int
    load_s: float


_SMALL = Size(
    hidden=1024, layers=4, heads=16, head_size=64, experts=32, chosen=4, inner=512,
    vocabulary=8192, rows=4, row_tokens=1024,
)  # fmt: skip
_LARGE = Size(
    hidden=2048, layers=2, heads=32, head_size=128, experts=32, chosen=8, inner=768,
    vocabulary=16_384, rows=4, row_tokens=2048,
)  # fmt: skip
_TINY = Size(
    hidden=64, layers=2, heads=4, head_size=16, experts=4, chosen=2, inner=32,
    vocabulary=96, rows=2, row_tokens=16,
)  # fmt: skip
REAL = Scale(
    small=_SMALL,
    large=_LARGE,
    steps=30,
    pairs=20,
    matrix=8192,
    grouped={  # up projections with gate
        "Qwen3-30B-A3B": (128, 65_536, 2048, 1536),
        "Mixtral-8x7B": (8, 16_384, 4096, 28_672),
        "few rows": (64, 2048, 2048, 2816),
    },
    shapes=tuple((r, t) for t in (256, 512, 1024, 2048) for r in (1, 2, 3, 4, 6, 8)),
    repeats=12,
    load_s=3.0,
)
TINY = Scale(
    small=_TINY,
    large=_TINY,
    steps=4,
    pairs=2,
    matrix=64,
    grouped={"tiny": (4, 64, 32, 48), "one expert": (1, 16, 32, 48)},
    shapes=((1, 8), (2, 8), (1, 16), (2, 16), (3, 16)),
    repeats=4,
    load_s=0.2,
)


class HostEvent:
    """An event of a device that does at once what it is given: the CPU."""

    def record(self) -> None:
        self._at_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "HostEvent") -> float:
        return 1e3 * (other._at_s - self._at_s)


def new_event(device: torch.device) -> Any:
    """An event of the device that can be timed."""
    return cuda_event() if device.type == "cuda" else HostEvent()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_s(device: torch.device, action: Callable[[], object]) -> float:
    """Seconds of an action by the wall clock, from an idle device to an idle device."""
    synchronize(device)
    began_s = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - began_s


def device_s(device: torch.device, action: Callable[[], object], repeats: int) -> float:
    """Median seconds of an action between two events; runs beforehand are not counted."""
    for _ in range(3):
        action()
    events = []
    for _ in range(repeats):
        began, ended = new_event(device), new_event(device)
        began.record()
        action()
        ended.record()
        events.append((began, ended))
    synchronize(device)
    median_ms: float = statistics.median(b.elapsed_time(e) for b, e in events)
    return median_ms * 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Of interleaved pairs: median of their ratios, with a 95 % interval by order statistics."""

    name: str = figure("of")
    median: float = figure("median ratio")
    lower95: float = figure("lower 95 %")
    upper95: float = figure("upper 95 %")
    seconds: float = figure("seconds")
    against_seconds: float = figure("against seconds")


def interleaved(
    name: str,
    device: torch.device,
    action: Callable[[], object],
    against: Callable[[], object],
    pairs: int,
) -> Ratio:
    """Time two actions in turn, from idle device to idle device."""
    for _ in range(3):
        action()
        against()
    spent: list[tuple[float, float]] = []
    for number in range(pairs):
        if number % 2:
            own_s = wall_s(device, action)
            spent.append((own_s, wall_s(device, against)))
        else:
            other_s = wall_s(device, against)
            spent.append((wall_s(device, action), other_s))
    ratios = sorted(own / other for own, other in spent)
    upper = upper_place(len(ratios))
    return Ratio(
        name=name,
        median=statistics.median(ratios),
        lower95=ratios[len(ratios) - 1 - upper],
        upper95=ratios[upper],
        seconds=statistics.median(own for own, _ in spent),
        against_seconds=statistics.median(other for _, other in spent),
    )


def micro_batch(
    size: Size, seed: int = 0, *, rows: int = 0, row_tokens: int = 0
) -> dict[str, Tensor]:
    """A micro-batch of random tokens in host memory, each row one document."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows or size.rows, (row_tokens or size.row_tokens) + 1)
    tokens = torch.randint(0, size.vocabulary, shape, generator=generator)
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def require(is_so: bool, sentence: str) -> None:
    """Let the section fail with a sentence."""
    if not is_so:
        raise AssertionError(sentence)


def upper_place(count: int) -> int:
    """Place of the order statistic that the median exceeds with a probability below 2.5 %."""
    below = 0.0
    for place in range(count):
        below += comb(count, place) / 2.0**count
        if below >= 0.975:
            return place
    return count - 1


def worst(values: Iterable[float]) -> float:
    """The largest distance from 1 of some ratios, signed."""
    return max((value - 1.0 for value in values), key=abs)
