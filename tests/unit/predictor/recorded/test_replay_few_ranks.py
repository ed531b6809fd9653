"""What replay says of stages of a few ranks: one slow rank is named, and told once."""

import pytest

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.predictor.recorded.analyze import analyze
from pacekeeper.predictor.recorded.anomalies import AnomalyKind
from support.slow_ranks import pipeline, slowed

ONSET = 20


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_one_slow_rank_is_named_beside_few_peers_or_none_and_told_once(
    num_ranks: int, num_stages: int
) -> None:
    trace = pipeline(num_dp=num_ranks, num_stages=num_stages, num_steps=2 * ONSET, tells_work=True)
    (found,) = analyze(slowed(trace, 0, 1.3, first=ONSET)).anomalies
    assert (found.kind, found.rank) == (AnomalyKind.COMPUTE, 0)
    assert found.low < 1.3 < found.high
    assert (found.tier is Tier.CONFIRMED) == (num_ranks > 2)


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_two_slow_ranks_of_so_few_are_their_stages_and_nobodys(num_ranks: int) -> None:
    trace = pipeline(num_dp=num_ranks, num_stages=2, num_steps=2 * ONSET)
    for rank in (0, 1):
        trace = slowed(trace, rank, 1.3, first=ONSET)
    (found,) = analyze(trace).anomalies
    assert (found.kind, found.rank, found.stage) == (AnomalyKind.HOST, None, 0)
    assert f"2 of {num_ranks} ranks of stage 0 together" in found.reason
