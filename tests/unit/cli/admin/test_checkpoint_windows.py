"""`pacekeeper checkpoint` on windows: what going back does; one under way is no damage."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pacekeeper.cli.admin.checkpoint import command
from support.trainees import TINY, Lone


@pytest.fixture
def lone(tmp_path: Path) -> Lone:
    """Windows of steps 1 to 3 and 4 to 6, and one that has begun."""
    one = Lone(tmp_path, replace(TINY, checkpoint_window_steps=3))
    one.grow(7)
    return one


def said(*words: str) -> str:
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 0, done.output
    return done.output


def asked(*words: str) -> Any:
    return json.loads(said(*words, "--json"))


def test_the_list_says_which_are_windows_and_which_is_under_way(lone: Lone) -> None:
    rows = asked("ls", str(lone.root))["checkpoints"]
    assert [(row["step"], row["state"]) for row in rows] == [
        (9, "incomplete"),
        (6, "complete"),
        (3, "complete"),
    ]
    assert [row["steps_again"] for row in rows] == [None, 2, 2]
    assert rows[1]["lost_tokens"] == 0 and rows[1]["oldest_step"] == 6


def test_every_step_is_read_by_verify_and_listed_by_show(lone: Lone) -> None:
    rows = asked("verify", str(lone.root))["checkpoints"]
    assert [row["state"] for row in rows] == ["incomplete", "verified", "verified"]
    shown = asked("show", str(lone.root))
    assert (shown["step"], shown["steps_again"]) == (6, 2)
    assert {piece["step"] for piece in shown["pieces"]} == {4, 5, 6}


def test_what_is_under_way_and_the_newest_whole_one_stay(lone: Lone) -> None:
    names = lone.names()
    assert asked("gc", str(lone.root), "--keep", "1")["removed"] == names[:1]
    assert lone.names() == names[1:]


def test_show_says_what_saving_costs_and_which_period_would_cost_least(lone: Lone) -> None:
    costs = asked("show", str(lone.root))["costs"]
    assert costs["num_restores"] == 0 and costs["held_s"] > 0.0
    assert costs["best_period_steps"] >= 1
    assert costs["text"] in said("show", str(lone.root))
