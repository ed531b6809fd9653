"""Slow links of a recorded job: whose, since when, until when, by how much - and not of healthy."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.predictor.recorded.anomalies import Anomaly, AnomalyKind
from pacekeeper.predictor.recorded.online_rules import slow_links
from pacekeeper.predictor.recorded.trace import LayoutTable, OwnTransferTable, Trace, Worker
from support.examples import seeds

NUM_STEPS, FIRST, END = 80, 40, 60
FIRST_STEP = 100  # number of the first recorded one


def recorded(
    slow: Mapping[int, float], *, seed: int = 0, num_ranks: int = 4, first: int = FIRST,
    end: int = NUM_STEPS, jitter: float = 0.03,
) -> Trace:  # fmt: skip
    """Two ranks to a node; `slow`: how many times as long a rank's transfers took, [first, end)."""
    draw = np.random.default_rng(seed)
    step, rank = (grid.ravel() for grid in np.indices((NUM_STEPS, num_ranks)))
    moved = draw.integers(2_000_000, 4_000_000, len(step)).astype(np.float64)
    factor = np.array([slow.get(r, 1.0) for r in range(num_ranks)])[rank]
    factor = np.where((step >= first) & (step < end), factor, 1.0)
    took_s = (0.0005 + moved / 1e9) * factor * np.exp(draw.normal(0.0, jitter, len(step)))
    return Trace(
        name="job",
        source="test",
        workers=tuple(Worker(rank=r, node=f"node-{r // 2}") for r in range(num_ranks)),
        own_transfers=OwnTransferTable(
            step=FIRST_STEP + step, rank=rank, num_bytes=moved, transfer_s=took_s
        ),
    )


def without(trace: Trace, rows: np.ndarray) -> Trace:
    """The times of these rows were not told."""
    table = trace.own_transfers
    assert table is not None
    took_s = np.where(rows, np.nan, table.transfer_s)
    return replace(trace, own_transfers=replace(table, transfer_s=took_s))


def ranks_of(anomalies: Sequence[Anomaly]) -> list[int | None]:
    return sorted((anomaly.rank for anomaly in anomalies), key=lambda rank: rank or 0)


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_a_slow_link_is_named_from_its_first_slow_step(seed: int, factor: float) -> None:
    (found,) = slow_links(recorded({seed: factor}, seed=seed))
    assert (found.kind, found.rank) == (AnomalyKind.LINK, seed)
    assert (found.first_step, found.last_step) == (FIRST_STEP + FIRST, None)
    assert found.low < found.slowdown < found.high
    assert found.slowdown == pytest.approx(factor, rel=0.05)
    assert "its link" in found.reason and found.reason.endswith("to the end of the record")


def test_one_that_recovers_says_its_last_slow_step() -> None:
    (found,) = slow_links(recorded({1: 2.0}, end=END))
    assert (found.first_step, found.last_step) == (FIRST_STEP + FIRST, FIRST_STEP + END - 1)
    assert found.slowdown == pytest.approx(2.0, rel=0.05)


def test_a_short_one_is_measured_without_the_steps_after_it() -> None:
    (found,) = slow_links(recorded({1: 2.0}, end=FIRST + 6, jitter=0.01))
    assert found.last_step == FIRST_STEP + FIRST + 5
    assert found.slowdown == pytest.approx(2.0, rel=0.05)


def test_both_ends_of_a_link_and_a_node_say_where_it_is() -> None:
    ends = slow_links(recorded({0: 3.0, 2: 3.0}))
    assert ranks_of(ends) == [0, 2]
    assert all("between ranks 0 and 2" in found.reason for found in ends)
    node = slow_links(recorded({2: 3.0, 3: 3.0}))
    assert ranks_of(node) == [2, 3]
    assert all("the link of node node-1" in found.reason for found in node)


@pytest.mark.parametrize("seed", seeds(6))
def test_healthy_links_accuse_nobody(seed: int) -> None:
    assert slow_links(recorded({}, seed=seed, num_ranks=8)) == ()


def test_a_slow_fabric_is_no_ranks_link() -> None:
    (found,) = slow_links(recorded(dict.fromkeys(range(4), 3.0)))
    assert (found.rank, found.kind) == (None, AnomalyKind.LINK)
    assert found.low < 3.0 < found.high
    assert "a node or port that all exchange with, or all hosts" in found.reason


def test_steps_in_which_a_rank_tells_nothing_are_passed_over() -> None:
    trace = recorded({2: 2.0})
    assert trace.own_transfers is not None
    silent = (trace.own_transfers.step % 4 == 1) & (trace.own_transfers.rank == 3)
    (found,) = slow_links(without(trace, silent))
    assert (found.rank, found.first_step) == (2, FIRST_STEP + FIRST)
    assert slow_links(without(trace, trace.own_transfers.rank == 3)) == ()


def test_the_first_step_of_a_layout_is_not_judged_and_the_finding_outlasts_it() -> None:
    step = FIRST_STEP + np.arange(NUM_STEPS)
    layouts = LayoutTable(step=step, generation=1 + (step >= FIRST_STEP + 50).astype(np.intp))
    (found,) = slow_links(replace(recorded({2: 2.0}, end=70), layouts=layouts))
    assert (found.first_step, found.last_step) == (FIRST_STEP + FIRST, FIRST_STEP + 69)


def test_without_transfers_there_is_nothing_to_say() -> None:
    assert slow_links(Trace(name="t", source="test", workers=())) == ()
