"""The quality benchmark compares like with like: same samples, same deaths, real restores."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import checkpoint_quality
from benchmarks.byte_jobs import byte_job, tokenize_bytes, write_text
from benchmarks.checkpoint_quality import Verdict, is_kept, judge, uniform
from benchmarks.quality_ranks import State, ThreadJob
from benchmarks.quality_runs import (
    CONTROL,
    EXACT,
    FULL,
    JOB,
    NUM_DEATHS,
    NUM_EXPERTS,
    NUM_LAYERS,
    UNDISTURBED,
    Death,
    Mode,
    Result,
    deaths,
    die,
    first_layout,
    run,
    split_texts,
)

from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.layout.layout import Block, BlockKind
from support.examples import seeds

pytest.importorskip("transformers")

PLAIN = EngineConfig(**JOB)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """A short job with a checkpoint after each step."""
    folder = tmp_path_factory.mktemp("quality")
    tokenize_bytes([write_text(folder, 1 << 12)], folder / "held.bin")
    own = {"evaluation_data": (str(folder / "held.bin"),), "evaluation_rows": 4}
    few: dict[str, Any] = {"steps": 16, "rows_per_step": 4, "row_tokens": 16, "warmup_steps": 0}
    return byte_job(folder, **JOB | own | few | {"checkpoint_period_steps": 1})


@cache
def short(mode: Mode, job: EngineConfig) -> Result:
    """A death of one rank and one of all."""
    return run(replace(mode, num_deaths=min(mode.num_deaths, 2)), job, 3)


def result(loss: float, **values: object) -> Result:
    same = {"plt": 0.0, "num_saved": 0, "saved_bytes": 1, "digest": "", "after": ()}
    return Result(loss=loss, **(same | values))  # type: ignore[arg-type]


def test_a_run_that_goes_back_to_whole_checkpoints_is_the_undisturbed_one_bit_by_bit(
    job: EngineConfig,
) -> None:
    full, undisturbed = short(FULL, job), short(UNDISTURBED, job)
    assert full.digest == undisturbed.digest
    assert full.loss == undisturbed.loss
    assert full.plt == 0.0 and len(full.after) == 2 and full.saved_bytes > 0


def test_so_is_one_that_does_the_steps_of_a_window_again(job: EngineConfig) -> None:
    assert short(EXACT, job).digest == short(FULL, job).digest


def test_partial_checkpoints_lose_tokens_and_change_the_run(job: EngineConfig) -> None:
    part = short(Mode(name="turn", num_saved=1), job)
    assert part.digest != short(FULL, job).digest
    assert part.plt > 0.0 and part.num_saved == 1


def test_what_is_reset_is_what_the_dead_rank_held_alone(job: EngineConfig, tmp_path: Path) -> None:
    baseline = first_layout()
    one = ThreadJob(config=FULL.config(job, str(tmp_path)), layout=baseline, directory=tmp_path)
    one.train(3)
    die(one, Death(step=3, victims=(1,)), FULL, baseline)
    assert one.step == 3 and set(one.layout.ranks) == {0, 1}
    before = one.blocks()
    alone = {b for b in baseline.blocks() if baseline.holders(b) == (1,)}
    one.reset(alone)
    now = one.blocks()
    assert {b for b in now if not same(now[b], before[b])} == alone != set()
    one.train(1)
    one.close()


def same(one: State, other: State) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_every_other_expert_has_two_hosts() -> None:
    layout = first_layout()
    for layer in range(NUM_LAYERS):
        numbers = [
            len(layout.holders(Block(BlockKind.EXPERT, layer, expert)))
            for expert in range(NUM_EXPERTS)
        ]
        assert sorted(numbers) == [1, 1, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize("seed", seeds(5))
def test_each_quarter_of_a_run_has_its_death_after_the_first_checkpoint(seed: int) -> None:
    found = deaths(FULL, PLAIN, seed)
    assert [death.step * NUM_DEATHS // PLAIN.steps for death in found] == list(range(NUM_DEATHS))
    assert all(one.step < other.step for one, other in pairwise(found))
    assert found[0].step >= EXACT.rarer * PLAIN.checkpoint_period_steps + EXACT.window - 1
    assert [death.victims == (0, 1) for death in found] == [False, True] * (NUM_DEATHS // 2)
    whole_ones = deaths(EXACT, PLAIN, seed)
    assert all(len(death.victims) == 2 for death in whole_ones)
    assert [death.step for death in whole_ones] == [death.step for death in found]


def test_no_document_that_is_held_out_is_learnt_from(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.py" for number in range(40)]
    for number, path in enumerate(paths):
        path.write_text(f"x = {number % 34}" if number else "")  # some twice, one empty
    training, held = ({path.read_text() for path in part} for part in split_texts(paths))
    assert held and not training & held
    assert training | held == {f"x = {number}" for number in range(34)}


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
