"""Recorded expert loads as the workload of a simulated job: which part of tokens goes where, when.

SmartMoE's artefact (`expert_tokens.npz`): iteration [times], layer [layers], counts [times, ranks,
layers, experts].
"""

from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from pacekeeper.core.errors import DataError

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.intp]
NEEDED = ("iteration", "counts")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routing:
    """parts [times, layers, experts] of a layer's tokens, which add up to 1; steps [times] from
    which each holds, ascending from 0. After the last one it stays.
    """

    parts: Array
    steps: Counts

    @property
    def num_layers(self) -> int:
        return int(self.parts.shape[1])

    @property
    def num_experts(self) -> int:
        return int(self.parts.shape[2])

    def at(self, step: int) -> Array:
        """[layers, experts] at a step."""
        place = int(np.searchsorted(self.steps, step, side="right")) - 1
        now: Array = self.parts[place]
        return now

    def next_change(self, step: int) -> int | None:
        """The first step after `step` at which the loads are others; None: they stay."""
        place = int(np.searchsorted(self.steps, step, side="right"))
        return int(self.steps[place]) if place < len(self.steps) else None

    def thinned(self, every_steps: int) -> "Routing":
        """With a change every `every_steps` at most."""
        kept, last = [0], 0
        for place, step in enumerate(self.steps.tolist()):
            if step >= last + every_steps:
                kept.append(place)
                last = step
        return Routing(parts=self.parts[kept], steps=self.steps[kept])


def even_routing(num_layers: int, num_experts: int) -> Routing:
    """Every expert of every layer gets as much."""
    parts = np.full((1, num_layers, num_experts), 1.0 / num_experts)
    return Routing(parts=parts, steps=np.zeros(1, dtype=np.intp))


def read_routing(path: Path, *, num_experts: int, num_layers: int | None = None) -> Routing:
    """The busiest experts of each layer over the whole record, in their own order.

    As in Lazarus' evaluation (6.1): `num_experts` of those recorded, the first `num_layers` layers
    (all, if not given), all ranks together. Raises DataError for what is no such file, and for
    fewer experts or layers than asked for.
    """
    try:
        with np.load(path, allow_pickle=False) as trace:
            missing = [name for name in NEEDED if name not in trace]
            if missing:
                raise DataError(f"{path}: no {', '.join(missing)}", remedy=_FORM)
            iteration, counts = trace["iteration"], trace["counts"]
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}", remedy=_FORM) from None
    except (ValueError, EOFError, BadZipFile, TypeError, AttributeError, MemoryError) as error:
        raise DataError(f"{path}: no arrays of numpy: {error}", remedy=_FORM) from None
    if not (isinstance(iteration, np.ndarray) and isinstance(counts, np.ndarray)):
        raise DataError(f"{path}: iteration or counts are no arrays", remedy=_FORM)
    if iteration.ndim != 1 or counts.ndim != 4 or len(iteration) != len(counts) or not counts.size:
        raise DataError(f"{path}: iteration {iteration.shape}, counts {counts.shape}", remedy=_FORM)
    if iteration.dtype.kind not in "iu" or counts.dtype.kind not in "iuf":
        raise DataError(f"{path}: iteration or counts are no numbers", remedy=_FORM)
    rows = counts.sum(axis=1, dtype=np.float64)
    layers = rows.shape[1] if num_layers is None else num_layers
    if not (1 <= layers <= rows.shape[1] and 1 <= num_experts <= rows.shape[2]):
        raise DataError(
            f"{path}: has {rows.shape[1]} layers of {rows.shape[2]} experts, not {layers} of "
            f"{num_experts}"
        )
    rows = rows[:, :layers]
    if not np.isfinite(rows).all() or (rows < 0.0).any():
        raise DataError(f"{path}: counts must be finite and not negative")
    busiest = np.sort(np.argsort(-rows.sum(axis=0), axis=1, kind="stable")[:, :num_experts], axis=1)
    chosen = np.take_along_axis(rows, busiest[None], axis=2)
    total = chosen.sum(axis=2, keepdims=True)
    if (np.diff(iteration.astype(np.int64)) <= 0).any():
        raise DataError(f"{path}: iterations must ascend")
    steps = (iteration.astype(np.int64) - int(iteration[0])).astype(np.intp)
    # A moment at which none of the chosen experts has a token says nothing: even parts.
    parts = np.where(total > 0.0, chosen / np.maximum(total, 1.0), 1.0 / num_experts)
    return Routing(parts=parts, steps=steps)


_FORM = "expected iteration [times] and counts [times, ranks, layers, experts] in a .npz file"
