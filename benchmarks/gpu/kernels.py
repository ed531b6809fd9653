"""Grouped products of experts against a loop over them, and against the kernel laws."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

from benchmarks.gpu.common import NotRun, Scale, device_s, figure, require
from pacekeeper.core.kernel_laws.kernels import GroupedProduct, backward
from pacekeeper.core.kernel_laws.laws import time_s

MOST_APART = 2e-2  # of results in bfloat16, relative to the largest


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One shape, forward and with backward."""

    name: str = figure("shape")
    experts: int = figure("experts")
    rows: int = figure("rows")
    inputs: int = figure("inputs")
    outputs: int = figure("outputs")
    grouped_ms: float = figure("grouped, ms")
    loop_ms: float = figure("loop, ms")
    speedup: float = figure("loop / grouped")
    tflops: float = figure("grouped, TFLOP/s")
    law_ratio: float = figure("law / grouped")
    trained_ms: float = figure("grouped with backward, ms")
    trained_speedup: float = figure("loop / grouped with backward")
    trained_law_ratio: float = figure("law / grouped with backward")
    apart: float = figure("largest difference, relative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """Figures of `compare_products`."""

    shapes: tuple[Shape, ...] = figure("bfloat16 products, rows skewed over the experts")
    are_empty_gradients_zero: bool = figure("weights of experts without rows have gradient zero")


def compare_products(device: torch.device, scale: Scale) -> Grouped:
    """Time `torch.nn.functional.grouped_mm` and a loop over the experts at three shapes."""
    if not hasattr(torch.nn.functional, "grouped_mm"):
        raise NotRun(f"torch {torch.__version__} has no grouped_mm")
    shapes = tuple(
        _shape(name, device, *sizes, scale.repeats) for name, sizes in scale.grouped.items()
    )
    return Grouped(shapes=shapes, are_empty_gradients_zero=_empty_gradients_are_zero(device))


def skewed_counts(num_experts: int, num_rows: int) -> list[int]:
    """Return rows of each expert: the busiest get several times as many as the mean."""
    source = Random(num_experts)
    weights = [source.lognormvariate(0.0, 0.5) for _ in range(num_experts)]
    ends = [0]
    for n in range(num_experts):
        ends.append(round(num_rows * sum(weights[: n + 1]) / sum(weights)))
    return [end - begin for begin, end in pairwise(ends)]


def _shape(
    name: str,
    device: torch.device,
    experts: int,
    rows: int,
    inputs: int,
    outputs: int,
    repeats: int,
) -> Shape:
    counts = skewed_counts(experts, rows)
    dtype = torch.bfloat16
    given = torch.randn(rows, inputs, device=device, dtype=dtype, requires_grad=True)
    weights = torch.randn(experts, outputs, inputs, device=device, dtype=dtype) * inputs**-0.5
    weights.requires_grad_()
    ends = torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)
    upstream = torch.randn(rows, outputs, device=device, dtype=dtype)

    def grouped() -> Tensor:
        return torch.nn.functional.grouped_mm(given, weights.transpose(-2, -1), offs=ends)

    def loop() -> Tensor:
        parts = zip(given.split(counts), weights.unbind(), strict=True)
        return torch.cat([part @ weight.T for part, weight in parts])

    def trained(forward: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            given.grad = weights.grad = None
            forward().backward(upstream)

        return run

    apart = _difference(grouped, loop, upstream, given, weights)
    require(apart < MOST_APART, f"{name}: grouped products and the loop differ by {apart:.3g}")
    with torch.no_grad():
        grouped_s, loop_s = (device_s(device, one, repeats) for one in (grouped, loop))
    both_s, both_loop_s = (device_s(device, trained(one), repeats) for one in (grouped, loop))
    kernel = GroupedProduct(tuple(counts), inputs, outputs)
    law_s = time_s(kernel)
    return Shape(
        name=name,
        experts=experts,
        rows=rows,
        inputs=inputs,
        outputs=outputs,
        grouped_ms=grouped_s * 1e3,
        loop_ms=loop_s * 1e3,
        speedup=loop_s / grouped_s,
        tflops=2.0 * rows * inputs * outputs / grouped_s * 1e-12,
        law_ratio=law_s / grouped_s,
        trained_ms=both_s * 1e3,
        trained_speedup=both_loop_s / both_s,
        trained_law_ratio=(law_s + sum(map(time_s, backward(kernel)))) / both_s,
        apart=apart,
    )


def _difference(
    grouped: Callable[[], Tensor],
    loop: Callable[[], Tensor],
    upstream: Tensor,
    given: Tensor,
    weights: Tensor,
) -> float:
    """The largest difference of results and gradients, relative to the largest value of each."""
    found: list[tuple[Tensor, ...]] = []
    for one in (grouped, loop):
        given.grad = weights.grad = None
        out = one()
        out.backward(upstream)
        assert given.grad is not None and weights.grad is not None, "both were computed"
        found.append((out.detach(), given.grad, weights.grad))
    return max(
        float((a.float() - b.float()).abs().max() / b.float().abs().max())
        for a, b in zip(*found, strict=True)
    )


def _empty_gradients_are_zero(device: torch.device) -> bool:
    """Whether groups without rows have weights' gradients of zero, in memory used before."""
    experts, side = 8, 512
    counts = [64, 0, 64, 0, 0, 64, 0, 64]
    torch.full((experts, side, side), float("nan"), device=device, dtype=torch.bfloat16)  # let go
    given = torch.randn(sum(counts), side, device=device, dtype=torch.bfloat16)
    weights = torch.randn(experts, side, side, device=device, dtype=torch.bfloat16)
    weights.requires_grad_()
    ends = torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)
    out = torch.nn.functional.grouped_mm(given, weights.transpose(-2, -1), offs=ends)
    out.backward(torch.ones_like(out))  # the kernel takes no expanded gradient, as that of a sum
    assert weights.grad is not None, "just computed"
    empty = [number for number, count in enumerate(counts) if not count]
    return not bool(weights.grad[empty].any())
