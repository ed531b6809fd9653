"""What unevenly spread work costs a step, as the cost model prices it. Pure.

A step waits for its busiest rank: what it would be without the excess over the mean of the ranks is
lost to the spread. Faults have no part in it: the price is that of healthy ranks.
"""

from collections.abc import Mapping

from pacekeeper.core.findings import FindingKind
from pacekeeper.predictor.cost_model import CostModel
from pacekeeper.predictor.workload import FEATURES, Array, StepSample

OF_SEQUENCES = ("tokens", "sum_len_squared", "num_documents")
SEQUENCES = [at for at, name in enumerate(FEATURES) if name in OF_SEQUENCES]
EXPERTS = [at for at in range(1, len(FEATURES)) if at not in SEQUENCES]


def lost_to_spread(model: CostModel, sample: StepSample) -> Mapping[FindingKind, float]:
    """Seconds of the step that evenly spread sequences, and experts' rows, would save each.

    Where they hide each other each gets the mean of its saving with and without the other (Shapley
    value): together they are what a wholly even step saves.
    """

    def busiest_s(*evened: list[int]) -> float:
        work: Array = sample.features.copy()
        for columns in evened:
            work[:, columns] = work[:, columns].mean(axis=0)
        return float(model.expected_s(work).max())

    whole_s, even_s = busiest_s(), busiest_s(SEQUENCES, EXPERTS)
    even_sequences_s, even_experts_s = busiest_s(SEQUENCES), busiest_s(EXPERTS)
    return {
        FindingKind.SEQUENCE_IMBALANCE: (whole_s - even_sequences_s + even_experts_s - even_s) / 2,
        FindingKind.EXPERT_IMBALANCE: (whole_s - even_experts_s + even_sequences_s - even_s) / 2,
    }
