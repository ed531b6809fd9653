"""The work of one step as numbers: one row of features per rank. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pacekeeper.core.records import MicroBatchRecord

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.intp]

# Expected time = sum over features of coefficient * feature. The order is used by forecast.py.
FEATURES = ("one", "tokens", "sum_len_squared", "expert_rows", "num_active_experts")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSample:
    """One complete step of one role: features [ranks, FEATURES], observed compute seconds [ranks].

    Rows follow `ranks`, ascending. The arrays are not to be written to.
    """

    step: int
    generation: int
    ranks: tuple[int, ...]
    features: Array
    observed_s: Array

    @property
    def num_microbatches(self) -> int:
        """Of each rank: all run as many, and a record that was lost only hides one."""
        return int(self.features[:, FEATURES.index("one")].max())


def features_of(record: MicroBatchRecord) -> tuple[float, ...]:
    """One micro-batch's row: in a step each micro-batch adds its own fixed cost."""
    return (
        1.0,
        float(record.tokens),
        float(record.sum_len_squared),
        float(record.expert_rows),
        float(record.num_active_experts),
    )


def sample_of(records: Sequence[MicroBatchRecord]) -> StepSample:
    """Add up the micro-batches of one step and generation, rank by rank.

    Raises ValueError for no records, or records of several steps or generations.
    """
    if not records:
        raise ValueError("a step without records has no sample")
    if len({(r.step, r.generation) for r in records}) != 1:
        raise ValueError("the records are of several steps or generations")
    ranks = tuple(sorted({r.rank for r in records}))
    row = {rank: i for i, rank in enumerate(ranks)}
    features = np.zeros((len(ranks), len(FEATURES)))
    observed_s = np.zeros(len(ranks))
    at = [row[record.rank] for record in records]
    np.add.at(features, at, [features_of(record) for record in records])
    np.add.at(observed_s, at, [record.compute_s for record in records])
    features.flags.writeable = observed_s.flags.writeable = False
    return StepSample(
        step=records[0].step,
        generation=records[0].generation,
        ranks=ranks,
        features=features,
        observed_s=observed_s,
    )
