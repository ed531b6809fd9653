"""Seconds that kernels take on a GPU: tiles in waves, split sums, memory traffic, launch gaps.

The numbers of `H100` are fitted to measured kernel times (bf16, H100 SXM) of Vidur (MLSys 2024,
https://github.com/microsoft/vidur, data/profiling, MIT licence) by `benchmarks/kernel_laws.py`,
which also says how far off they are on shapes that they were not fitted to. What is not measured
there is a stated assumption, with its source beside the number.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pacekeeper.core.kernel_laws.kernels import (
    ELEMENT_BYTES,
    Attention,
    GroupedProduct,
    Kernel,
    Product,
    Stream,
    StreamKind,
)

SPLITS = (1, 2, 4, 8)  # parts of a long sum that are computed at once
SUM_STEP = 64  # terms of a sum that a tile takes at once
ATTENTION_TILE = 128  # queries and keys


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductLaw:
    """Matrix products: the fastest of a few tile sizes and splits, beside the memory traffic.

    Attributes:
        tile_flops_per_s: Of one multiprocessor, by (rows, outputs) of a tile.
        floor_s: Of the smallest product.
        bytes_per_s: Of the memory.
        overlap: How well traffic hides behind arithmetic: 1 adds them up, more is nearer the
            larger of the two.
        split_s_per_byte: Of partial sums that are written and added up.
    """

    tile_flops_per_s: Mapping[tuple[int, int], float]
    floor_s: float
    bytes_per_s: float
    overlap: float
    split_s_per_byte: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLaw:
    """Kernels bound by memory: a floor, a speed in the cache, and one beyond it.

    Attributes:
        floor_s: Of the smallest.
        cached_bytes_per_s: Of the first bytes.
        cached_bytes: How many these are.
        bytes_per_s: Of all others.
    """

    floor_s: float
    cached_bytes_per_s: float
    cached_bytes: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLaw:
    """FlashAttention, for heads of 128: tiles of queries by tiles of keys.

    Attributes:
        flops_per_s: Of the whole device, within tiles.
        overhead_tiles: What the start and end of a tile of queries take, in tiles.
    """

    flops_per_s: float
    overhead_tiles: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU, as far as times of kernels depend on it.

    Attributes:
        name: For people.
        num_units: Its multiprocessors, which compute one tile each at a time.
        gap_s: Between the end of a kernel and the start of the next in a stream.
        product: Of matrix products.
        streams: Of kernels bound by memory.
        attention: Forward.
        attention_backward: Backward; its work is 2.5 times the forward work.
        softmax_share: Part of an attention tile's time that does not grow with the head size.
    """

    name: str
    num_units: int
    gap_s: float
    product: ProductLaw
    streams: Mapping[StreamKind, StreamLaw]
    attention: AttentionLaw
    attention_backward: AttentionLaw
    softmax_share: float


def kernel_s(kernel: Kernel, device: Device) -> float:
    """Return the seconds of a kernel on a device, without the gap after it."""
    match kernel:
        case Product(rows, inputs, outputs):
            return _products_s(((rows, inputs, outputs),), device)
        case GroupedProduct(rows, inputs, outputs, is_weight_gradient):
            if is_weight_gradient:
                return _products_s([(inputs, n, outputs) for n in rows], device)
            return _products_s([(n, inputs, outputs) for n in rows], device)
        case Attention():
            return _attention_s(kernel, device)
        case Stream(kind, num_bytes):
            law = device.streams[kind]
            cached = min(num_bytes, law.cached_bytes)
            beyond_s = (num_bytes - cached) / law.bytes_per_s
            return max(law.floor_s, cached / law.cached_bytes_per_s + beyond_s)


@lru_cache(maxsize=8192)
def time_s(kernel: Kernel) -> float:
    """Return the seconds of a kernel on the H100 of the table, with the gap after it."""
    return kernel_s(kernel, H100) + H100.gap_s


def _products_s(groups: Sequence[tuple[int, int, int]], device: Device) -> float:
    """Seconds of products (rows, inputs, outputs) of one kernel.

    Tiles of all groups are dealt out together, whole tiles to whole multiprocessors. Where sums
    differ in length, the last tile ends half the longest one late.
    """
    law = device.product
    sizes = [(m, math.ceil(k / SUM_STEP) * SUM_STEP, n) for m, k, n in groups]
    longest = max(k for _, k, _ in sizes)
    is_even = all(k == longest for _, k, _ in sizes)
    results = sum(m * n for m, _, n in groups)
    best_s = math.inf
    for (tile_m, tile_n), flops_per_s in law.tile_flops_per_s.items():
        tiles = [math.ceil(m / tile_m) * math.ceil(n / tile_n) for m, _, n in sizes]
        sum_s = 2.0 * tile_m * tile_n / flops_per_s  # of one term of each sum of a tile
        if not is_even:
            mean = sum(count * k for count, (_, k, _) in zip(tiles, sizes, strict=True))
            best_s = min(best_s, sum_s * (mean / device.num_units + longest / 2))
            continue
        for split in SPLITS:
            waves = math.ceil(sum(tiles) * split / device.num_units)
            terms = math.ceil(longest / split / SUM_STEP) * SUM_STEP
            partial = results * 2 * ELEMENT_BYTES * split if split > 1 else 0
            best_s = min(best_s, waves * terms * sum_s + partial * law.split_s_per_byte)
    moved = ELEMENT_BYTES * sum(m * k + k * n + m * n for m, k, n in groups)
    memory_s = moved / law.bytes_per_s
    power = law.overlap
    both: float = (best_s**power + memory_s**power) ** (1.0 / power)
    return law.floor_s + both


def _attention_s(kernel: Attention, device: Device) -> float:
    """Tiles of each head and document, those above the diagonal and before the window left out."""
    law = device.attention_backward if kernel.is_backward else device.attention
    tile = ATTENTION_TILE
    reach = math.ceil(kernel.window / tile) + 1 if kernel.window else 1 << 62
    tiles, longest = 0.0, 0
    for length in kernel.lengths:
        count = math.ceil(length / tile)
        full = min(count, reach)
        pairs = full * (full + 1) // 2 + (count - full) * full
        tiles += pairs + count * law.overhead_tiles
        longest = max(longest, full)
    head = device.softmax_share + (1.0 - device.softmax_share) * kernel.head_size / 128
    flops = (10.0 if kernel.is_backward else 4.0) * tile * tile * 128 * head
    unit_s = flops / (law.flops_per_s / device.num_units)
    # The last of the multiprocessors ends half of the longest run of tiles after the mean.
    return device.product.floor_s + unit_s * (tiles * kernel.heads / device.num_units + longest / 2)


H100 = Device(
    name="H100 SXM 80 GB",
    num_units=132,
    # Median gap between kernels of one stream, PyTorch profile of an 8 x H100 job (modded-nanogpt,
    # records/track_1_short/2025-12-11, MIT licence).
    gap_s=1.9e-6,
    product=ProductLaw(
        tile_flops_per_s={(64, 64): 2.32e12, (64, 128): 4.6e12, (128, 256): 5.87e12},
        floor_s=5.07e-6,
        bytes_per_s=3.01e12,
        overlap=2.33,
        split_s_per_byte=1.53e-13,
    ),
    streams={
        StreamKind.ADD: StreamLaw(
            floor_s=3.06e-6,
            cached_bytes_per_s=3.5e12,
            cached_bytes=5.87e7,
            bytes_per_s=3.17e12,
        ),
        StreamKind.ACTIVATION: StreamLaw(
            floor_s=4.12e-6,
            cached_bytes_per_s=1.16e12,
            cached_bytes=4.04e6,
            bytes_per_s=1.96e12,
        ),
        StreamKind.NORM: StreamLaw(
            floor_s=6e-6,
            cached_bytes_per_s=1.38e12,
            cached_bytes=3.41e7,
            bytes_per_s=1.02e12,
        ),
        StreamKind.ROTARY: StreamLaw(
            floor_s=3.05e-6,
            cached_bytes_per_s=1.04e12,
            cached_bytes=3.84e6,
            bytes_per_s=1.66e12,
        ),
        StreamKind.EMBEDDING: StreamLaw(
            floor_s=4.05e-6,
            cached_bytes_per_s=3.36e11,
            cached_bytes=1.49e6,
            bytes_per_s=6.47e11,
        ),
    },
    # FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608, figures 5 and 6): bf16, head size 128,
    # forward causal, backward not causal. Its published speeds are met within 3 %.
    attention=AttentionLaw(flops_per_s=6.97e14, overhead_tiles=1.8),
    attention_backward=AttentionLaw(flops_per_s=6.1e14, overhead_tiles=3.37),
    # Heads of 64 reach 0.77 of the speed of heads of 128, of 256 1.04 (the same figures).
    softmax_share=0.25,
)
