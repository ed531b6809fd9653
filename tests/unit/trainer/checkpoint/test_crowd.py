"""Two launches of one job in one directory: the earlier one is told, once, what becomes of it."""

from pathlib import Path

import pytest

from support.trainees import Lone

WORDS = "a later launch of this job saves in"


def test_a_later_launch_beside_it_is_said_once_and_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    earlier, later = Lone(tmp_path, run_id=1), Lone(tmp_path, run_id=2)
    for lone in (earlier, later, later, earlier, earlier, earlier):
        lone.train()
        lone.save()
    said = [line for line in caplog.messages if WORDS in line]
    assert len(said) == 1 and str(earlier.root) in said[0] and "job name of its own" in said[0]
    assert "do all nodes see it" not in caplog.text, "it is not the nodes"


def test_who_follows_an_earlier_launch_is_told_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for run_id in (1, 2):
        lone = Lone(tmp_path, run_id=run_id)
        for _ in range(3):
            lone.train()
            lone.save()
    assert WORDS not in caplog.text
