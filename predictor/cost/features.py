"""The work of one step as numbers: one row of features per rank, and per micro-batch. Pure."""

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

# Expected time = sum over features of coefficient * feature. The order is used by forecast.py.
# The last ones make the price of an expert's rows bend upwards at the knots.
BENDS = tuple(f"rows_over_{knot}" for knot in KNOTS)
_USES = {name: column.use for name, column in MICRO_BATCH_COLUMNS.items()}
FEATURES = ("one", *(name for name, use in _USES.items() if use is not Use.NONE))
# Work that tensor parallelism divides.
DENSE = tuple(name for name, use in _USES.items() if use is Use.DENSE_FEATURE)

_OTHERS = ("rank", "step", "generation", "micro_batch", "compute_s", "tensor_share")
COLUMNS = (*_OTHERS, *FEATURES[1:])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureTable:
    """Micro-batches as told, a column for each of COLUMNS: arrays [micro-batches], not to be
    written to. Integers up to 2^53 are exact.
    """

    columns: Mapping[str, Array]

    def __len__(self) -> int:
        return len(self.columns["rank"])

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    @property
    def step(self) -> int:
        """Of the first micro-batch."""
        return int(self.columns["step"][0])

    def only(self, rows: Flags | Positions) -> "FeatureTable":
        """These micro-batches alone."""
        return FeatureTable(columns={name: column[rows] for name, column in self.columns.items()})

    def slowed(self, rank: int, slowdown: float) -> "FeatureTable":
        """The same work, for which `rank` computed `slowdown` times as long."""
        compute_s = np.where(self["rank"] == rank, self["compute_s"] * slowdown, self["compute_s"])
        return FeatureTable(columns={**self.columns, "compute_s": compute_s})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicrobatchSamples:
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
    parts: MicrobatchSamples | None = None

    @property
    def num_microbatches(self) -> int:
        """Of each rank: all run as many, and a record that was lost only hides one."""
        return int(self.features[:, FEATURES.index("one")].max())


def work_of(tables: Sequence[MicroBatchTable]) -> FeatureTable:
    """All micro-batches of these tables, in order; of none, no work."""
    length = sum(map(len, tables))
    columns = {}
    for name in COLUMNS:
        if any(name in table.columns for table in tables):
            columns[name] = np.fromiter(chain_column(tables, name), np.float64, length)
        else:
            columns[name] = np.full(length, DEFAULTS.get(name, 0.0), dtype=np.float64)
    return FeatureTable(columns=columns)


def last_reported(work: FeatureTable) -> FeatureTable:
    """Of micro-batches of one step that were told more than once, the last."""
    if not len(work):
        return work
    count = work["micro_batch"].max() + 1.0
    key = work["rank"] * count + work["micro_batch"]
    _, first = np.unique(key[::-1], return_index=True)
    return work if len(first) == len(key) else work.only(np.sort(len(key) - 1 - first))


def sample_of(records: Sequence[MicroBatchRecord]) -> StepSample:
    """The same as `sample_of_work`, of records. Raises as it does."""
    if not records:
        raise ValueError("a step without records has no sample")
    return sample_of_work(work_of([table_from_records(records)]))


def sample_of_work(work: FeatureTable) -> StepSample:
    """Add up the micro-batches of one step and generation, rank by rank.

    In a step each micro-batch adds its own fixed cost; dense work counts with the part of it that
    the rank holds.

    Raises ValueError for no work, or work of several steps or generations.
    """
    if not len(work):
        raise ValueError("a step without records has no sample")
    for name in ("step", "generation"):
        if work[name].min() != work[name].max():
            raise ValueError("the records are of several steps or generations")
    features_of = _features_of(work)
    ranks, row = np.unique(work["rank"].astype(np.intp), return_inverse=True)
    features = np.stack(
        [np.bincount(row), *(np.bincount(row, weights=column) for column in features_of)], axis=1
    ).astype(np.float64)
    observed_s = np.bincount(row, weights=work["compute_s"]).astype(np.float64)
    features.flags.writeable = observed_s.flags.writeable = False
    return StepSample(
        step=work.step,
        generation=int(work["generation"][0]),
        ranks=tuple(ranks.tolist()),
        features=features,
        observed_s=observed_s,
        parts=_parts_of(len(ranks), row, work["micro_batch"], work["compute_s"], features_of),
    )


def microbatch_features(work: FeatureTable) -> Array:
    """What the cost model prices of each micro-batch [rows, FEATURES]."""
    features: Array = np.stack([np.ones(len(work)), *_features_of(work)], axis=1)
    return features


def _features_of(work: FeatureTable) -> list[Array]:
    """Of each feature but the first [rows]: dense work counts with the part that the rank holds."""
    told = {name: work[name] for name in FEATURES[1:]}
    if work["tensor_share"].min() < 1.0:
        told |= {name: told[name] * work["tensor_share"] for name in DENSE}
    return list(told.values())


def _parts_of(
    num_ranks: int, row: Positions, micro_batch: Array, observed: Array, work: Sequence[Array]
) -> MicrobatchSamples | None:
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
    return MicrobatchSamples(features=features, observed_s=observed_s)
