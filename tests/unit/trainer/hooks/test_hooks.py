"""Wrong attachments: one clear warning or ValueError, and training continues."""

import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.records import MicroBatchRecord
from pacekeeper.trainer.hooks import hooks
from support.rings import records_in

Said = Callable[[], list[str]]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.WARNING, "pacekeeper.trainer.hooks.ring_writer"):
        yield lambda: caplog.messages


def attach(folder: Path, **more: Any) -> hooks.Hooks:
    return hooks.attach(**{"job": "j", "rank": 0, "world_size": 1, "ring_dir": str(folder), **more})


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ({"rank": "0"}, "rank='0'"),
        ({"world_size": None}, "world_size=None: expected a whole number"),
        ({"rank": 4, "world_size": 4}, "rank 4 is not in a world of 4: ranks count from 0"),
        ({"world_size": 0}, "world of 0"),
        ({"job": "my run"}, "job name 'my run': expected"),
    ],
)  # fmt: skip
def test_a_wrong_place_is_refused_with_what_it_should_be(
    tmp_path: Path, place: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        attach(tmp_path, **place)


def test_a_folder_that_can_not_be_is_said_with_its_remedy(tmp_path: Path, said: Said) -> None:
    (tmp_path / "file").touch()
    attach(tmp_path / "file")
    (only,) = said()
    assert "PACEKEEPER_RING_DIR" in only


def test_a_second_attachment_of_a_rank_is_told(tmp_path: Path, said: Said) -> None:
    first = attach(tmp_path)
    attach(tmp_path, rank=1, world_size=2)
    assert said() == []
    attach(tmp_path).detach()
    (warning,) = said()
    assert "rank=0" in warning
    first.detach()


def test_who_detached_may_attach_again(tmp_path: Path, said: Said) -> None:
    attach(tmp_path).detach()
    attach(tmp_path).detach()
    assert said() == []


def test_two_processes_that_say_they_are_one_rank_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = attach(tmp_path)
    child = os.fork()
    if not child:
        logging.basicConfig(force=True)
        attach(tmp_path, world_size=2)
        os._exit(0)
    os.waitpid(child, 0)
    said = capfd.readouterr().err
    assert f"process {os.getpid()}" in said
    first.detach()


def test_a_child_that_trains_with_its_parents_attachment_is_told_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pace = attach(tmp_path)
    child = os.fork()
    if not child:
        logging.basicConfig(force=True)
        for step in range(3):
            with pace.step(step):
                pass
        os._exit(0)
    os.waitpid(child, 0)
    assert capfd.readouterr().err.count("attach after the fork") == 1
    pace.detach()


@pytest.mark.parametrize("steps", [3, shm_ring.SLOT_COUNT + 5])
def test_a_ring_that_no_agent_reads_is_told_once(tmp_path: Path, said: Said, steps: int) -> None:
    pace = attach(tmp_path)
    for step in range(steps):
        with pace.step(step):
            pass
    assert len(said()) == (steps > shm_ring.SLOT_COUNT), "at once where records are lost"
    pace.detach()
    assert len(said()) == 1
    assert "--ring-dir" in said()[0]


def test_a_ring_that_an_agent_reads_says_nothing(tmp_path: Path, said: Said) -> None:
    pace = attach(tmp_path)
    assert pace.ring.path is not None
    with pace.step(0):
        pass
    with pace.ring.path.open("r+b") as file:
        file.seek(shm_ring.HEARTBEAT_OFFSET)
        file.write(shm_ring.HEARTBEAT.pack(1.0))
    pace.detach()
    assert said() == []


def test_a_wrong_value_is_said_with_the_line_that_told_it(tmp_path: Path, said: Said) -> None:
    pace = attach(tmp_path)
    with pace.step(0), pace.micro_batch_timer(tokens=0.5):  # type: ignore[arg-type]
        pass
    assert f"{__file__}:" in said()[0]
    pace.detach()


def test_rows_that_are_known_inside_are_told(tmp_path: Path) -> None:
    pace = attach(tmp_path)
    with pace.step(0), pace.micro_batch_timer(tokens=5, expert_rows=1) as batch:
        batch.add_expert_rows([4, 0, 9000])
        batch.add_expert_rows([1, 2])
        batch.add_expert_rows(7)  # a layer whose experts' shares only the device knows
        batch.add_expert_rows("many")  # type: ignore[arg-type]
    assert pace.ring.path is not None
    (told,) = [r for r in records_in(pace.ring.path) if isinstance(r, MicroBatchRecord)]
    assert (told.tokens, told.expert_rows, told.num_active_experts) == (5, 1 + 9004 + 3 + 7, 4)
    assert (told.rows_over_16, told.rows_over_1024) == (9000 - 16, 9000 - 1024)
    assert pace.ring.num_errors == 1
    pace.detach()
