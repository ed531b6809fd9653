"""Plain PyTorch with our one line, or blocks: the slow rank is found, and no other."""

from collections.abc import Iterator
from statistics import median

import pytest

from pacekeeper.core.telemetry.records import MicroBatchRecord, StepRecord
from support.controllers import until
from support.foreign_fleet import ForeignRuns, foreign_runs
from support.forked_ranks import SLOW_RANK, SLOWDOWN, STEPS
from support.torch_runs import PIECES, SEQUENCES, TOKENS, WAYS_STEPS


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForeignRuns]:
    with foreign_runs("torch_runs", tmp_path_factory.mktemp("runs")) as found:
        yield found


def batches_of(runs: ForeignRuns, job: str, rank: int = 0) -> list[MicroBatchRecord]:
    return [r for r in runs.records(job, rank) if isinstance(r, MicroBatchRecord)]


@pytest.mark.parametrize(
    ("job", "steps"),
    [
        ("compiled", range(WAYS_STEPS)),
        ("scaled", range(WAYS_STEPS)),  # also the one that the scaler skipped
        ("raising", range(3)),  # a step that raised is told once, when it is done
        ("between", range(WAYS_STEPS)),  # evaluations and barriers are not told
        ("stages", range(WAYS_STEPS)),
    ],
)
def test_each_step_and_micro_batch_is_told_once(runs: ForeignRuns, job: str, steps: range) -> None:
    ended = [r.step for r in runs.records(job) if isinstance(r, StepRecord)]
    told = [(r.step, r.micro_batch, r.tokens) for r in batches_of(runs, job)]
    assert ended == list(steps)
    assert told == [(step, 0, SEQUENCES * TOKENS) for step in steps]


def test_rows_of_a_step_that_raised_are_forgotten(runs: ForeignRuns) -> None:
    assert {r.expert_rows for r in batches_of(runs, "raising")} == {SEQUENCES * TOKENS}


@pytest.mark.parametrize(("job", "slow"), [("between", 1), ("stages", 0)])
def test_a_rank_that_waits_for_a_slow_one_is_not_as_slow(
    runs: ForeignRuns, job: str, slow: int
) -> None:
    """Parameters are sharded, or stages wait for each other: in every pass."""
    of_slow, of_other = (batches_of(runs, job, rank) for rank in (slow, 1 - slow))
    assert median(r.compute_s for r in of_slow) > 0.7 * PIECES[job]
    assert median(r.compute_s for r in of_other) < 0.5 * PIECES[job]
    assert median(r.wait_s or 0.0 for r in of_other) > 0.5 * PIECES[job]


def test_training_goes_on_where_no_ring_can_be(runs: ForeignRuns) -> None:
    assert "all are done" in (runs.folder / "alone.log").read_text()


def test_a_rank_that_becomes_slow_is_found_though_every_layer_waits_for_all(
    runs: ForeignRuns,
) -> None:
    runs.until_told("slow")
    until("the slow rank is found", lambda: runs.faults("slow"))
    faults = runs.faults("slow")
    assert [(fault.kind, fault.rank) for fault in faults] == [("device", SLOW_RANK)], faults
    assert faults[0].slowdown == pytest.approx(SLOWDOWN, rel=0.3)


def test_long_sequences_on_one_rank_accuse_nobody(runs: ForeignRuns) -> None:
    runs.until_told("uneven")
    assert runs.job("uneven").step == STEPS - 1
    assert runs.faults("uneven") == []
