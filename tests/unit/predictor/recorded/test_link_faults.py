"""A slow link is found by the groups that use it, and cleared by those that do not."""

from itertools import combinations

import numpy as np
import pytest

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.predictor.recorded.anomalies import AnomalyKind
from pacekeeper.predictor.recorded.collective_stragglers import link_faults
from pacekeeper.predictor.recorded.trace import Trace, TransferTable, Worker
from support.examples import seeds

PAIRS = tuple(combinations(range(6), 2))


def job(
    groups: tuple[tuple[int, ...], ...],
    slow: dict[int, float],
    *,
    num_steps: int = 40,
    first: int = 20,
    end: int = 40,
    seed: int = 0,
    common: float = 1.0,
) -> Trace:
    """Each group moves 1 MB and 4 MB a step; `slow`: group -> slowdown from `first` to `end`."""
    random = np.random.default_rng(seed)
    rows = []
    for step in range(num_steps):
        for group in range(len(groups)):
            factor = slow.get(group, 1.0) if first <= step < end else 1.0
            factor *= common if step >= first else 1.0
            for num_bytes in (1e6, 4e6):
                took_s = num_bytes / 1e9 * factor * random.lognormal(0.0, 0.05)
                rows.append((step, group, num_bytes, took_s))
    columns = np.array(rows)
    return Trace(
        name="job",
        source="test",
        workers=tuple(Worker(rank=r, node=f"n{r // 2}") for r in range(6)),
        groups=groups,
        transfers=TransferTable(
            step=columns[:, 0].astype(np.intp), group=columns[:, 1].astype(np.intp),
            num_bytes=columns[:, 2], transfer_s=columns[:, 3],
        ),
    )  # fmt: skip


@pytest.mark.parametrize("rank", range(6))
def test_the_rank_that_all_slow_pairs_share_is_named(rank: int) -> None:
    slow = {i: 1.8 for i, pair in enumerate(PAIRS) if rank in pair}
    (anomaly,) = link_faults(job(PAIRS, slow))
    assert (anomaly.kind, anomaly.rank, anomaly.first_step) == (AnomalyKind.LINK, rank, 20)
    assert anomaly.last_step is None
    assert anomaly.low <= 1.8 * 1.05 and anomaly.high >= 1.8 * 0.95


def test_the_node_that_all_slow_groups_cross_is_named() -> None:
    slow = {i: 1.8 for i, (a, b) in enumerate(PAIRS) if (a // 2 == 1) != (b // 2 == 1)}
    (anomaly,) = link_faults(job(PAIRS, slow))
    assert anomaly.rank is None
    assert "the link of node n1" in anomaly.reason


def test_one_slow_pair_is_told_as_such() -> None:
    (anomaly,) = link_faults(job(PAIRS, {PAIRS.index((1, 4)): 2.0}))
    assert anomaly.rank is None
    assert "between ranks 1 and 4" in anomaly.reason


def test_two_slow_places_at_once_are_two_findings() -> None:
    slow = {i: 1.8 for i, pair in enumerate(PAIRS) if 0 in pair} | {PAIRS.index((3, 4)): 3.0}
    pair, port = link_faults(job(PAIRS, slow))
    assert (pair.rank, port.rank) == (None, 0)
    assert "between ranks 3 and 4" in pair.reason and "5 groups" in port.reason


def test_what_groups_do_not_tell_apart_is_no_ranks() -> None:
    halves = ((0, 1, 2), (3, 4, 5))
    (anomaly,) = link_faults(job(halves, {0: 2.0}))
    assert (anomaly.rank, anomaly.tier) == (None, Tier.SUSPECTED)
    assert "[0, 1, 2] do not tell which link" in anomaly.reason


def test_a_fault_that_is_over_says_when() -> None:
    (anomaly,) = link_faults(job(PAIRS, {0: 2.0}, first=10, end=25))
    assert (anomaly.first_step, anomaly.last_step) == (10, 24)


@pytest.mark.parametrize("seed", seeds(20))
def test_a_healthy_fabric_has_no_slow_link(seed: int) -> None:
    assert link_faults(job(PAIRS, {}, seed=seed)) == ()


def test_a_fabric_that_is_busy_for_all_accuses_no_link() -> None:
    assert link_faults(job(PAIRS, {}, common=1.6)) == ()


def test_a_lone_group_is_compared_with_its_own_past() -> None:
    (anomaly,) = link_faults(job(((0, 1, 2, 3),), {0: 1.7}))
    assert (anomaly.rank, anomaly.first_step) == (None, 20)


def test_without_transfers_there_is_nothing_to_say() -> None:
    assert link_faults(Trace(name="t", source="test", workers=())) == ()
