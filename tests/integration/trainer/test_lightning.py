"""Lightning's own Trainer, watched: a slow rank is found, long sequences accuse nobody."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from pacekeeper.core.telemetry.records import ExpertLoadRecord, MicroBatchRecord, StepRecord
from support.controllers import until
from support.foreign_fleet import ForeignRuns, foreign_runs
from support.forked_ranks import SLOW_RANK, SLOWDOWN, STEPS

pytestmark = [
    pytest.mark.skipif(
        find_spec("lightning") is None or find_spec("pytorch_lightning") is None,
        reason="lightning is not installed: pip install 'pacekeeper[dev-adapters]'",
    ),
]
ROWS, TOKENS, CHOICES = 2, 8, 2  # of the lone runs; six batches an epoch


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForeignRuns]:
    with foreign_runs("lightning_runs", tmp_path_factory.mktemp("runs")) as found:
        yield found


@pytest.mark.parametrize(
    ("job", "batches_of"),
    [
        ("first", {0: 4, 1: 2, 2: 4, 3: 2}),  # the last step of an epoch has what is left
        ("resumed", {4: 4, 5: 2}),
        ("manual", dict.fromkeys(range(6), 1)),
        ("elder", dict.fromkeys(range(6), 1)),
    ],
)
def test_each_step_and_micro_batch_is_told_once_whatever_else_the_trainer_does(
    runs: ForeignRuns, job: str, batches_of: dict[int, int]
) -> None:
    records = runs.records(job)
    ended = [r.step for r in records if isinstance(r, StepRecord)]
    batches = [r for r in records if isinstance(r, MicroBatchRecord)]
    assert ended == list(batches_of)
    told = [(r.step, r.micro_batch) for r in batches]
    assert told == [(step, b) for step, count in batches_of.items() for b in range(count)]
    work = {(r.tokens, r.sum_len_squared, r.num_documents) for r in batches}
    assert work == {(ROWS * TOKENS, ROWS * TOKENS**2, ROWS)}


def test_experts_are_told_per_step_without_the_evaluations(runs: ForeignRuns) -> None:
    loads = [r for r in runs.records("first") if isinstance(r, ExpertLoadRecord)]
    assert [(r.step, sum(r.counts)) for r in loads] == [
        (step, batches * ROWS * TOKENS * CHOICES) for step, batches in enumerate((4, 2, 4, 2))
    ]


def test_an_evaluation_in_the_middle_is_no_part_of_a_step(runs: ForeignRuns) -> None:
    """The first step holds one: it is waited for in no micro-batch and not in the step."""
    for record in runs.records("first"):
        if isinstance(record, StepRecord):
            assert record.input_wait_s is not None
            assert record.input_wait_s <= record.duration_s


def test_training_goes_on_where_no_ring_can_be(runs: ForeignRuns) -> None:
    assert "all are done" in (runs.folder / "alone.log").read_text()


def test_a_rank_that_becomes_slow_is_found(runs: ForeignRuns) -> None:
    runs.until_told("slow")
    until("the slow rank is found", lambda: runs.faults("slow"))
    faults = runs.faults("slow")
    assert [(fault.kind, fault.rank) for fault in faults] == [("device", SLOW_RANK)], faults
    assert faults[0].slowdown == pytest.approx(SLOWDOWN, rel=0.3)


def test_long_sequences_on_one_rank_accuse_nobody(runs: ForeignRuns) -> None:
    runs.until_told("uneven")
    assert runs.job("uneven").step == STEPS - 1
    assert runs.faults("uneven") == []
