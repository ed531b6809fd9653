"""The work of one step as numbers: one row of features per rank, and per micro-batch. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from pacekeeper.core.expert_rows import KNOTS
from pacekeeper.core.records import MicroBatchRecord

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.intp]

# Expected time = sum over features of coefficient * feature. The order is used by forecast.py.
# The last ones make the price of an expert's rows bend upwards at the knots.
BENDS = tuple(f"rows_over_{knot}" for knot in KNOTS)
FEATURES = (
    "one", "tokens", "sum_len_squared", "expert_rows", "num_active_experts", "num_documents",
    "head_tokens", *BENDS,
)  # fmt: skip
DENSE = ("tokens", "sum_len_squared", "num_documents")  # work that tensor parallelism shares out

_COLUMNS = ("rank", "step", "generation", "micro_batch", "compute_s", "tensor_share")
_row_of = attrgetter(*_COLUMNS, *FEATURES[1:])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """A step's micro-batches, in order: features [parts, ranks, FEATURES], seconds [parts, ranks].

    The arrays are not to be written to.
    """

    features: Array
    observed_s: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSample:
    """One complete step of one role: features [ranks, FEATURES], observed compute seconds [ranks].

    Rows follow `ranks`, ascending. The arrays are not to be written to. `parts`: its micro-batches,
    None where there is one, or where not all ranks told the same ones.
    """

    step: int
    generation: int
    ranks: tuple[int, ...]
    features: Array
    observed_s: Array
    parts: Parts | None = None

    @property
    def num_microbatches(self) -> int:
        """Of each rank: all run as many, and a record that was lost only hides one."""
        return int(self.features[:, FEATURES.index("one")].max())


def sample_of(records: Sequence[MicroBatchRecord]) -> StepSample:
    """Add up the micro-batches of one step and generation, rank by rank.

    In a step each micro-batch adds its own fixed cost; dense work counts with the part of it that
    the rank holds. Column by column: a job of thousands of
    ranks has tens of thousands of records a step.

    Raises ValueError for no records, or records of several steps or generations.
    """
    if not records:
        raise ValueError("a step without records has no sample")
    columns = len(_COLUMNS) + len(FEATURES) - 1
    flat = np.fromiter(
        chain.from_iterable(map(_row_of, records)), np.float64, len(records) * columns
    ).reshape(len(records), columns)
    rank, step, generation, micro_batch, observed, tensor_share, *work = flat.T
    if step.min() != step.max() or generation.min() != generation.max():
        raise ValueError("the records are of several steps or generations")
    if tensor_share.min() < 1.0:
        for name in DENSE:
            work[FEATURES.index(name) - 1] = work[FEATURES.index(name) - 1] * tensor_share
    ranks, row = np.unique(rank.astype(np.intp), return_inverse=True)
    features = np.stack(
        [np.bincount(row), *(np.bincount(row, weights=column) for column in work)], axis=1
    ).astype(np.float64)
    observed_s = np.bincount(row, weights=observed).astype(np.float64)
    features.flags.writeable = observed_s.flags.writeable = False
    return StepSample(
        step=records[0].step,
        generation=records[0].generation,
        ranks=tuple(ranks.tolist()),
        features=features,
        observed_s=observed_s,
        parts=_parts_of(len(ranks), row, micro_batch, observed, work),
    )


def _parts_of(
    num_ranks: int, row: Positions, micro_batch: Array, observed: Array, work: Sequence[Array]
) -> Parts | None:
    """The records put in order of micro-batch and rank, if each is there exactly once."""
    num_parts = len(row) // num_ranks
    if num_parts < 2 or num_parts * num_ranks != len(row):
        return None
    order = np.lexsort((row, micro_batch))
    shape = num_parts, num_ranks
    by_part = micro_batch[order].reshape(shape)
    is_whole = (row[order].reshape(shape) == np.arange(num_ranks)).all()
    if not is_whole or (by_part != by_part[:, :1]).any():
        return None
    columns = [np.ones(shape), *(column[order].reshape(shape) for column in work)]
    features = np.stack(columns, axis=2)
    observed_s = observed[order].reshape(shape)
    features.flags.writeable = observed_s.flags.writeable = False
    return Parts(features=features, observed_s=observed_s)
