"""The quality benchmark compares like with like: same samples, same deaths, real restores."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from benchmarks import checkpoint_quality
from benchmarks.checkpoint_quality import Verdict, is_kept, judge, uniform
from benchmarks.quality_runs import (
    CONFIG,
    CONTROL,
    EXACT,
    FULL,
    NUM_DEATHS,
    UNDISTURBED,
    Death,
    Mode,
    Result,
    deaths,
    die,
    half_twice,
    run,
    texts,
)

from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.toy.engine.job_rules import first_layout
from pacekeeper.trainer.toy.model.dataset import Corpus
from support.examples import seeds
from support.thread_jobs import reset
from support.thread_ranks import State, ThreadRanks

SHORT = replace(
    CONFIG,
    steps=16,
    num_layers=2,
    hidden_size=16,
    expert_hidden_size=16,
    num_experts=4,
    rows_per_step=4,
    row_tokens=32,
    checkpoint_period_steps=1,
)


@pytest.fixture(autouse=True)
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of all runs have the same text."""
    monkeypatch.setattr(Corpus, "from_stdlib", staticmethod(read))


read = cache(Corpus.from_stdlib)


def short(mode: Mode) -> Result:
    """A death of one rank and one of all."""
    return run(replace(mode, num_deaths=min(mode.num_deaths, 2)), SHORT, 3)


@cache
def whole() -> Result:
    return short(FULL)


def result(loss: float, **values: object) -> Result:
    same = {"plt": 0.0, "num_saved": 0, "saved_bytes": 1, "digest": "", "after": ()}
    return Result(loss=loss, **(same | values))  # type: ignore[arg-type]


def test_a_run_that_goes_back_to_whole_checkpoints_is_the_undisturbed_one_bit_by_bit() -> None:
    full, undisturbed = whole(), short(UNDISTURBED)
    assert full.digest == undisturbed.digest
    assert full.loss == undisturbed.loss
    assert full.plt == 0.0 and len(full.after) == 2 and full.saved_bytes > 0


def test_so_is_one_that_does_the_steps_of_a_window_again() -> None:
    assert short(EXACT).digest == whole().digest


def test_partial_checkpoints_lose_tokens_and_change_the_run() -> None:
    part = short(Mode(name="turn", num_saved=1))
    assert part.digest != whole().digest
    assert part.plt > 0.0 and part.num_saved == 1


def test_what_is_reset_is_what_the_dead_rank_held_alone(tmp_path: Path) -> None:
    baseline = half_twice(first_layout(SHORT, 2))
    config = FULL.config(SHORT, str(tmp_path))
    job = ThreadRanks(config=config, layout=baseline, directory=tmp_path)
    job.train(3)
    die(job, Death(step=3, victims=(1,)), FULL, baseline)
    assert job.step == 3 and set(job.layout.ranks) == {0, 1}
    before = job.blocks()
    alone = {b for b in baseline.blocks() if baseline.holders(b) == (1,)}
    reset(job, alone)
    now = job.blocks()
    assert {b for b in now if not same(now[b], before[b])} == alone != set()
    job.train(1)
    job.close()


def same(one: State, other: State) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_every_other_expert_has_two_hosts() -> None:
    layout = half_twice(first_layout(CONFIG, 2))
    for layer in range(CONFIG.num_layers):
        numbers = [
            len(layout.holders(Block(BlockKind.EXPERT, layer, expert)))
            for expert in range(CONFIG.num_experts)
        ]
        assert sorted(numbers) == [1, 1, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize("seed", seeds(5))
def test_each_quarter_of_a_run_has_its_death_after_the_first_checkpoint(seed: int) -> None:
    found = deaths(FULL, CONFIG, seed)
    assert [death.step * NUM_DEATHS // CONFIG.steps for death in found] == list(range(NUM_DEATHS))
    assert all(one.step < other.step for one, other in pairwise(found))
    assert found[0].step >= EXACT.rarer * CONFIG.checkpoint_period_steps + EXACT.window - 1
    assert [death.victims == (0, 1) for death in found] == [False, True] * (NUM_DEATHS // 2)
    whole_ones = deaths(EXACT, CONFIG, seed)
    assert all(len(death.victims) == 2 for death in whole_ones)
    assert [death.step for death in whole_ones] == [death.step for death in found]


def test_nobody_learns_from_the_text_that_is_held_out() -> None:
    training, held = texts(replace(CONFIG, seed=1))
    learnt = {document for row in training.rows for document in row}
    asked = {document for row in held.rows for document in row}
    assert asked and not learnt & asked
    assert held.rows == texts(replace(CONFIG, seed=2))[1].rows
    assert training.rows != texts(replace(CONFIG, seed=2))[0].rows


def test_a_mode_is_judged_by_its_differences_from_full() -> None:
    """Two seeds: the mean of +1 and +3, and the interval of a t with one degree of freedom."""
    full = [result(10.0, after=(5.0,)), result(20.0, after=(6.0,))]
    found = [result(11.0, after=(5.5,)), result(23.0, after=(8.5,))]
    verdict = judge("other", found, full)
    assert verdict.difference == pytest.approx(2.0)
    assert verdict.half_width == pytest.approx(12.706, rel=1e-3)
    assert verdict.after == pytest.approx(1.5)
    assert verdict.is_within(15.0) and not verdict.is_within(14.0)


def verdict(name: str, **values: object) -> Verdict:
    few = {"difference": 0.0, "half_width": 0.1, "after": 0.0, "plts": (0.01,), "saved": 1.0}
    rest = {"name": name, "loss": 1.0, "num_saved": (3,), "is_same": False}
    return Verdict(**(few | rest | values))  # type: ignore[arg-type]


def test_bars_are_kept_where_few_lost_tokens_are_not_seen_and_the_control_is() -> None:
    seen = verdict(CONTROL.name, difference=9.0)
    assert is_kept([verdict("turn"), seen], 1.0)
    assert not is_kept([verdict("turn", difference=1.0), seen], 1.0)
    assert is_kept([verdict("turn", difference=1.0, plts=(0.01, 0.04)), seen], 1.0)
    assert not is_kept([verdict("turn"), verdict(CONTROL.name)], 1.0)
    assert not is_kept([verdict(EXACT.name), seen], 1.0)
    assert is_kept([verdict(EXACT.name, is_same=True), seen], 1.0)


def test_tokens_lost_are_those_of_the_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_quality, "LIFE", 60)
    counted, planned = uniform(2, 3)
    assert counted == pytest.approx(planned, rel=0.15)
