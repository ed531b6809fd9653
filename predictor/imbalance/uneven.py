"""What unevenly spread work costs a step, as the cost model prices it. Pure.

A step waits for its busiest rank, and a pipeline for its heaviest stage: what it would be without
the excess over the mean is lost to the spread. Faults have no part in it: the price is that of
healthy ranks.
"""

from collections.abc import Mapping, Sequence

from pacekeeper.core.incidents.findings import FindingKind
from pacekeeper.predictor.cost.features import FEATURES, Array, StepSample
from pacekeeper.predictor.cost.model import CostModel

OF_SEQUENCES = ("tokens", "sum_len_squared", "num_documents", "head_tokens")
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


def lost_of_roles(
    priced: Sequence[tuple[CostModel, StepSample]],
) -> Mapping[FindingKind, float]:
    """The same of a job whose roles are the stages of its pipelines: one model and sample each.

    Sequences and experts count in the heaviest stage, which the others wait for. With m
    micro-batches even stages save (1 - 1/m) of its excess over the mean stage, or more: of 1F1B all
    but one micro-batch pass at the pace of the heaviest. One rank alone has no peer to tell a heavy
    stage from a slow device by: then nothing is said of stages.
    """
    even_s = [float(model.expected_s(sample.features).mean()) for model, sample in priced]
    at = even_s.index(max(even_s))
    model, sample = priced[at]
    lost_s = dict(lost_to_spread(model, sample))
    if len(priced) > 1 and len(sample.ranks) > 1:
        excess_s = even_s[at] - sum(even_s) / len(even_s)
        lost_s[FindingKind.STAGE_IMBALANCE] = excess_s * (1.0 - 1.0 / sample.num_microbatches)
    return lost_s
