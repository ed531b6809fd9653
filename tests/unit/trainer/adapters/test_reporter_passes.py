"""Passes that take turns: each micro-batch has its own time and work, told once."""

from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pacekeeper.trainer.adapters.instrumentation.batch_features import NO_FEATURES
from pacekeeper.trainer.adapters.reporter import (
    HELD,
    Reporter,
    add_features,
    features_of_call,
)
from support.adapters import Pace

OVER = (0, 0, 0, 0)


@pytest.fixture
def pace(tmp_path: Path) -> Pace:
    return Pace(tmp_path)


@pytest.fixture
def reporter(pace: Pace) -> Reporter:
    return Reporter(pace.hooks, tensor_share=0.5)


def run(pace: Pace, reporter: Reporter, key: int, took_s: float, *, is_last: bool) -> None:
    reporter.enter_pass(key)
    pace.clock.now_s += took_s
    reporter.complete_pass() if is_last else reporter.suspend_pass()
    pace.clock.now_s += 100.0  # somebody else's


def test_micro_batches_that_take_turns_keep_their_own_time(pace: Pace, reporter: Reporter) -> None:
    reporter.begin_step(7)
    run(pace, reporter, 0, 1.0, is_last=False)
    run(pace, reporter, 1, 10.0, is_last=False)
    run(pace, reporter, 0, 2.0, is_last=True)
    run(pace, reporter, 1, 20.0, is_last=True)
    reporter.end_step()
    told = [(r.step, r.micro_batch, r.compute_s) for r in pace.micro_batches]
    assert told == [(7, 0, 3.0), (7, 1, 30.0)]
    assert [r.step for r in pace.steps] == [7]


def test_work_and_rows_are_of_the_micro_batch_that_computes(pace: Pace, reporter: Reporter) -> None:
    reporter.begin_step(0)
    reporter.enter_pass("a")
    reporter.add_features((100, 5000, 0, 0, OVER, 2, 0, 1.0))
    reporter.add_expert_rows([20, 0, 300])
    reporter.add_expert_rows([1, 1, 1])
    reporter.add_expert_rows(7)
    reporter.suspend_pass()
    reporter.add_expert_rows([9])  # nobody's
    reporter.enter_pass("b")
    reporter.complete_pass()
    reporter.enter_pass("a")
    reporter.complete_pass()
    reporter.end_step()
    b, a = pace.micro_batches
    assert (a.tokens, a.sum_len_squared, a.num_documents, a.tensor_share) == (100, 5000, 2, 0.5)
    assert (a.expert_rows, a.num_active_experts) == (330, 5)
    assert (a.rows_over_16, a.rows_over_64, a.rows_over_256) == (4 + 284, 236, 44)
    assert (b.tokens, b.expert_rows, b.num_active_experts) == (0, 0, 0)


def test_a_second_forward_of_a_micro_batch_is_more_of_it(pace: Pace, reporter: Reporter) -> None:
    reporter.begin_step(0)
    for tokens in (10, 20):
        reporter.enter_pass("a")
        reporter.add_features((tokens, tokens * tokens, 0, 0, OVER, 1, 0, 1.0))
        pace.clock.now_s += 1.0
    reporter.complete_pass()
    reporter.complete_pass()
    reporter.end_step()
    (told,) = pace.micro_batches
    assert (told.tokens, told.sum_len_squared, told.compute_s) == (30, 500, 2.0)


def test_half_of_a_sum_is_untold() -> None:
    whole = (10, 100, 0, 0, OVER, 1, 0, 1.0)
    assert add_features(whole, (5, 0, 0, 0, OVER, 0, 0, 1.0)) == (15, 0, 0, 0, OVER, 0, 0, 1.0)


def test_outside_of_steps_nothing_is_told(pace: Pace, reporter: Reporter) -> None:
    run(pace, reporter, 0, 1.0, is_last=True)
    reporter.add_expert_loads(0, torch.ones(4))
    reporter.end_step()
    reporter.begin_step(1)
    reporter.exit_training()
    run(pace, reporter, 0, 1.0, is_last=True)  # an evaluation's
    reporter.enter_training()
    reporter.end_step()
    assert pace.micro_batches == []
    assert [r.step for r in pace.steps] == [1]


def test_what_a_step_left_open_is_forgotten_with_it(pace: Pace, reporter: Reporter) -> None:
    reporter.begin_step(1)
    run(pace, reporter, 0, 1.0, is_last=False)
    reporter.enter_pass(1)
    reporter.add_expert_loads(0, torch.ones(4))
    reporter.abandon_step()
    reporter.begin_step(1)
    run(pace, reporter, 0, 5.0, is_last=False)
    run(pace, reporter, 0, 5.0, is_last=True)
    reporter.end_step()
    assert [r.compute_s for r in pace.micro_batches] == [10.0]
    assert pace.loads == []


def test_what_a_backward_pass_computes_again_is_counted_once(
    pace: Pace, reporter: Reporter
) -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        reporter.add_expert_rows([3])
        reporter.add_expert_rows(2)
        reporter.add_expert_loads(0, torch.tensor([2, 1]))
        return (x * x).sum()

    reporter.begin_step(0)
    reporter.enter_pass(0)
    out = checkpoint(layer, torch.ones(2, requires_grad=True), use_reentrant=False)
    out.backward()
    reporter.complete_pass()
    reporter.end_step()
    assert [r.expert_rows for r in pace.micro_batches] == [5]
    assert [r.counts for r in pace.loads] == [(2, 1)]


def test_loads_are_summed_over_the_micro_batches_of_a_step(pace: Pace, reporter: Reporter) -> None:
    for step in (4, 5):
        reporter.begin_step(step)
        for key in range(2):
            reporter.enter_pass(key)
            reporter.add_expert_loads(3, torch.tensor([1, 2, step]))
            reporter.complete_pass()
        reporter.end_step()
    assert [(r.step, r.layer, r.counts) for r in pace.loads] == [
        (4, 3, (2, 4, 8)),
        (5, 3, (2, 4, 10)),
    ]


def test_a_failing_call_is_counted_and_gives_nothing(pace: Pace, reporter: Reporter) -> None:
    assert reporter.run_guarded(len, (1, 2)) == 2
    assert reporter.run_guarded(len, 5) is None
    assert reporter.pace.ring.num_errors == 1


def test_waits_for_input_are_told(pace: Pace, reporter: Reporter) -> None:
    reporter.begin_step(0)
    assert list(reporter.loading(iter("ab"))) == ["a", "b"]
    reporter.end_step()
    (step,) = pace.steps
    assert step.input_wait_s is not None and step.input_wait_s > 0.0


@pytest.mark.parametrize(
    ("arguments", "named", "tokens", "squared"),
    [
        ((torch.zeros(2, 8, dtype=torch.int64),), {}, 16, 128),
        ((), {"input_ids": torch.zeros(2, 8)}, 16, 128),
        (({"input_ids": torch.zeros(3, 4)},), {}, 12, 48),
        ((torch.zeros(5), torch.zeros(2, 8, 64)), {}, 16, 128),
        ((None,), {"tokens": torch.zeros(1, 6)}, 6, 36),
    ],
)
def test_work_is_read_off_the_shapes_of_a_call(
    arguments: tuple[object, ...], named: dict[str, object], tokens: int, squared: int
) -> None:
    assert features_of_call(arguments, named)[:2] == (tokens, squared)


def test_a_call_without_tokens_is_untold() -> None:
    assert features_of_call((torch.zeros(5), "text"), {"labels": None}) == NO_FEATURES


def test_short_micro_batches_are_written_together_and_in_order(
    pace: Pace, reporter: Reporter
) -> None:
    reporter.begin_step(0)
    for _ in range(HELD):
        assert pace.micro_batches == []
        run(pace, reporter, 0, 0.5, is_last=True)
    assert [r.micro_batch for r in pace.micro_batches] == list(range(HELD))
    run(pace, reporter, 0, 0.5, is_last=True)
    reporter.abandon_step()
    reporter.begin_step(1)
    run(pace, reporter, 0, 0.5, is_last=True)
    reporter.detach()
    told = [(r.step, r.micro_batch) for r in pace.micro_batches]
    assert told == [(0, number) for number in range(HELD + 1)] + [(1, 0)]
