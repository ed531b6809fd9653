"""The benchmark of recoveries divides their time without a rest, and judges what has a bar."""

import json
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks.recovery_time import CASES, Blow, Recovery, figures_of, is_kept
from benchmarks.timed_ranks import PARTS, parts_of

KILLED, MANY, FROZEN = CASES


def test_the_parts_of_a_recovery_are_between_their_marks_and_add_up(tmp_path: Path) -> None:
    before = [["notice", 1.0], ["agree", 2.0], ["form", 3.0], ["move", 4.0]]  # of an earlier one
    during = [["notice", 10.1], ["leave", 10.2], ["agree", 10.5], ["form", 10.6], ["move", 11.0]]
    lines = [*before, *during, ["notice", 20.0]]
    (tmp_path / "parts-2.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    parts = parts_of(tmp_path, 2, 10.0, 11.5)
    assert parts == pytest.approx(dict(zip(PARTS, (0.1, 0.1, 0.3, 0.1, 0.4, 0.5), strict=True)))
    assert sum(parts.values()) == pytest.approx(1.5)


def recovery(next_step_s: float) -> Recovery:
    return Recovery(next_step_s=next_step_s, step_s=0.25, parts=dict.fromkeys(PARTS, 0.0))


def test_a_case_is_judged_by_what_its_blow_costs_beyond_a_step() -> None:
    found = figures_of([recovery(one) for one in (0.5, 0.6, 9.0)], [8.0, 7.0])
    assert found["kill_minus_step_s"] == pytest.approx(0.35)
    assert found["kill_minus_step_worst_s"] == pytest.approx(8.75)
    assert found["ratio"] == pytest.approx(7.5 / 0.6)
    assert is_kept(KILLED, found)
    assert not is_kept(replace(KILLED, bar_s=0.34), found)
    assert not is_kept(KILLED, found | {"ratio": 9.9})
    assert not is_kept(MANY, found | {"ratio": 9.9})
    assert is_kept(MANY, found | {"kill_minus_step_s": 1.0})


def test_a_frozen_rank_may_be_silent_for_its_limit_and_torchrun_has_no_such_case() -> None:
    assert FROZEN.number == signal.SIGSTOP and not FROZEN.is_compared
    assert is_kept(FROZEN, figures_of([recovery(4.6)], []))
    assert not is_kept(FROZEN, figures_of([recovery(4.7)], []))


def test_other_ranks_are_struck_each_time() -> None:
    draw = random.Random(0)
    blows = [Blow.drawn(draw, MANY) for _ in range(20)]
    assert len({blow.victims for blow in blows}) > 5
    assert all(len(set(blow.victims)) == MANY.num_struck for blow in blows)
