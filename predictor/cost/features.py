"""Feature tables: the work of a step per rank, and per micro-batch, as arrays.

Built from micro-batch records; used by the cost model and the detectors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pacekeeper.core.telemetry.expert_row_features import KNOTS
from pacekeeper.core.telemetry.microbatch_table import (
    DEFAULTS,
    MicroBatchTable,
    chain_column,
    table_from_records,
)
from pacekeeper.core.telemetry.records import MICRO_BATCH_COLUMNS, MicroBatchRecord, Use

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.intp]

# Expected time = sum over features of coefficient * feature. forecast.py relies on the order.
# The last ones increase the price of an expert's rows at the knots (piecewise linear, convex).
BENDS = tuple(f"rows_over_{knot}" for knot in KNOTS)
_USES = {name: column.use for name, column in MICRO_BATCH_COLUMNS.items()}
FEATURES = ("one", *(name for name, use in _USES.items() if use is not Use.NONE))
# Work that tensor parallelism divides.
DENSE = tuple(name for name, use in _USES.items() if use is Use.DENSE_FEATURE)

_OTHERS = ("rank", "step", "generation", "micro_batch", "compute_s", "tensor_share")
COLUMNS = (*_OTHERS, *FEATURES[1:])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureTable:
    """Reported micro-batches as columns: an array [micro-batches] for each of COLUMNS, read-only.

    Integers up to 2^53 are exact.
    """

    columns: Mapping[str, Array]

    def __len__(self) -> int:
        return len(self.columns["rank"])

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    @property
    def step(self) -> int:
        """Step of the first micro-batch."""
        return int(self.columns["step"][0])

    def only(self, rows: Flags | Positions) -> "FeatureTable":
        """Return these micro-batches only."""
        return FeatureTable(columns={name: column[rows] for name, column in self.columns.items()})

    def slowed(self, rank: int, slowdown: float) -> "FeatureTable":
        """Return the same work with the compute times of `rank` multiplied by `slowdown`."""
        compute_s = np.where(self["rank"] == rank, self["compute_s"] * slowdown, self["compute_s"])
        return FeatureTable(columns={**self.columns, "compute_s": compute_s})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicrobatchSamples:
    """A step's micro-batches, in order: features [parts, ranks, FEATURES], seconds [parts, ranks].

    The arrays are read-only.
    """

    features: Array
    observed_s: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSample:
    """One complete step of one role: work and compute time of each rank. Arrays are read-only.

    Attributes:
        step: its number.
        generation: of the layout.
        ranks: ascending.
        features: [ranks, FEATURES], summed over micro-batches.
        observed_s: [ranks] compute seconds.
        parts: its micro-batches; None if there is only one, or if the ranks did not report the same
            ones.
    """

    step: int
    generation: int
    ranks: tuple[int, ...]
    features: Array
    observed_s: Array
    parts: MicrobatchSamples | None = None

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per rank: the maximum, because all run as many and records may be lost."""
        return int(self.features[:, FEATURES.index("one")].max())


def work_of(tables: Sequence[MicroBatchTable]) -> FeatureTable:
    """Concatenate the micro-batches of these tables, in order; empty without any."""
    length = sum(map(len, tables))
    columns = {}
    for name in COLUMNS:
        if any(name in table.columns for table in tables):
            columns[name] = np.fromiter(chain_column(tables, name), np.float64, length)
        else:
            columns[name] = np.full(length, DEFAULTS.get(name, 0.0), dtype=np.float64)
    return FeatureTable(columns=columns)


def last_reported(work: FeatureTable) -> FeatureTable:
    """Keep the last report of each micro-batch of a step."""
    if not len(work):
        return work
    count = work["micro_batch"].max() + 1.0
    key = work["rank"] * count + work["micro_batch"]
    _, first = np.unique(key[::-1], return_index=True)
    return work if len(first) == len(key) else work.only(np.sort(len(key) - 1 - first))


def sample_of(records: Sequence[MicroBatchRecord]) -> StepSample:
    """Build the step sample of these records. Raises as `sample_of_work`."""
    if not records:
        raise ValueError("a step without records has no sample")
    return sample_of_work(work_of([table_from_records(records)]))


def sample_of_work(work: FeatureTable) -> StepSample:
    """Sum the micro-batches of one step and generation, rank by rank.

    Each micro-batch adds its own fixed cost; dense work is multiplied by the rank's tensor share.

    Raises:
        ValueError: there is no work, or it is of several steps or generations.
    """
    if not len(work):
        raise ValueError("a step without records has no sample")
    for name in ("step", "generation"):
        if work[name].min() != work[name].max():
            raise ValueError("the records are of several steps or generations")
    columns = _work_columns(work)
    ranks, row = np.unique(work["rank"].astype(np.intp), return_inverse=True)
    features = np.stack(
        [np.bincount(row), *(np.bincount(row, weights=column) for column in columns)], axis=1
    ).astype(np.float64)
    observed_s = np.bincount(row, weights=work["compute_s"]).astype(np.float64)
    features.flags.writeable = observed_s.flags.writeable = False
    return StepSample(
        step=work.step,
        generation=int(work["generation"][0]),
        ranks=tuple(ranks.tolist()),
        features=features,
        observed_s=observed_s,
        parts=_microbatch_samples(len(ranks), row, work["micro_batch"], work["compute_s"], columns),
    )


def microbatch_features(work: FeatureTable) -> Array:
    """Features of each micro-batch, as priced by the cost model [rows, FEATURES]."""
    features: Array = np.stack([np.ones(len(work)), *_work_columns(work)], axis=1)
    return features


def _work_columns(work: FeatureTable) -> list[Array]:
    """Columns [rows] of all features but the first; dense work multiplied by the tensor share."""
    columns = {name: work[name] for name in FEATURES[1:]}
    if work["tensor_share"].min() < 1.0:
        columns |= {name: columns[name] * work["tensor_share"] for name in DENSE}
    return list(columns.values())


def _microbatch_samples(
    num_ranks: int, row: Positions, micro_batch: Array, observed: Array, work: Sequence[Array]
) -> MicrobatchSamples | None:
    """Arrange the rows by micro-batch and rank; None unless each pair occurs exactly once."""
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
    return MicrobatchSamples(features=features, observed_s=observed_s)
