"""Hugging Face's own Trainer, watched: a slow rank is found, long sequences accuse nobody."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from pacekeeper.core.telemetry.records import ExpertLoadRecord, MicroBatchRecord, StepRecord
from support.controllers import until
from support.foreign_fleet import ForeignRuns, foreign_runs
from support.forked_ranks import SLOW_RANK, SLOWDOWN, STEPS

pytestmark = [
    pytest.mark.skipif(
        find_spec("transformers") is None or find_spec("accelerate") is None,
        reason="needs transformers and accelerate: pip install 'pacekeeper[dev-adapters]'",
    ),
]
SEQUENCES, TOKENS, LAYERS, CHOICES = 2, 16, 2, 2  # of the lone runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForeignRuns]:
    with foreign_runs("huggingface_runs", tmp_path_factory.mktemp("runs")) as found:
        yield found


@pytest.mark.parametrize(("job", "steps"), [("first", range(3)), ("resumed", range(2, 5))])
def test_each_step_and_micro_batch_is_told_once_whatever_else_the_trainer_does(
    runs: ForeignRuns, job: str, steps: range
) -> None:
    records = runs.records(job)
    ended = [r for r in records if isinstance(r, StepRecord)]
    batches = [r for r in records if isinstance(r, MicroBatchRecord)]
    assert [r.step for r in ended] == list(steps)
    assert [(r.step, r.micro_batch) for r in batches] == [(s, b) for s in steps for b in (0, 1)]
    work = {(r.tokens, r.sum_len_squared, r.num_documents) for r in batches}
    assert work == {(SEQUENCES * TOKENS, SEQUENCES * TOKENS**2, SEQUENCES)}
    assert {r.tokens for r in ended} == {2 * SEQUENCES * TOKENS}
    assert all(r.loss is not None and 3.0 < r.loss < 6.0 for r in ended)  # about log 64


def test_experts_are_told_per_step_and_layer_without_the_evaluations(runs: ForeignRuns) -> None:
    loads = [r for r in runs.records("first") if isinstance(r, ExpertLoadRecord)]
    assert [(r.step, r.layer) for r in loads] == [(s, layer) for s in range(3) for layer in (0, 1)]
    assert {sum(r.counts) for r in loads} == {2 * SEQUENCES * TOKENS * CHOICES}


def test_the_wait_for_input_is_told(runs: ForeignRuns) -> None:
    ended = [r for r in runs.records("first") if isinstance(r, StepRecord)]
    assert all(r.input_wait_s is not None and r.input_wait_s < r.duration_s for r in ended)


def test_training_goes_on_where_no_ring_can_be(runs: ForeignRuns) -> None:
    assert "train_runtime" in (runs.folder / "alone.log").read_text().splitlines()[-1]


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
