"""`pacekeeper checkpoint` as a person calls it: what there is, what is damaged, and exit codes."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.core.checkpoint.manifest import MANIFEST_FILE
from pacekeeper.core.errors import ExitCode
from support.commands import pacekeeper
from support.trainees import TINY, Lone


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[Lone]:
    """Two complete checkpoints, of steps 1 and 2, and one that was broken off."""
    one = Lone(tmp_path)
    one.grow(2)
    (one.root / one.names()[-1].replace("step00000002", "step00000003")).mkdir()
    yield one


def asked(*words: str, code: int = 0) -> dict[str, Any]:
    done = pacekeeper("checkpoint", *words, "--json")
    assert done.returncode == code, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def states(document: dict[str, Any]) -> list[tuple[int, str]]:
    return [(row["step"], row["state"]) for row in document["checkpoints"]]


def test_the_list_is_newest_first_from_the_directory_of_a_job_or_of_all(lone: Lone) -> None:
    wanted = [(3, "incomplete"), (2, "complete"), (1, "complete")]
    assert states(asked("ls", str(lone.root))) == wanted
    assert states(asked("ls", str(lone.root.parent) + "/")) == wanted


def test_what_is_whole_verifies_and_what_never_counted_is_no_damage(lone: Lone) -> None:
    found = asked("verify", str(lone.root))
    assert states(found) == [(3, "incomplete"), (2, "verified"), (1, "verified")]
    assert found["checkpoints"][1]["num_blocks"] == 6


def test_one_that_is_named_and_broken_off_is_not_what_was_hoped_for(lone: Lone) -> None:
    path = str(lone.root / lone.names()[-1])
    assert states(asked("verify", path, code=ExitCode.DATA)) == [(3, "incomplete")]


def test_a_flipped_bit_is_named_with_file_and_block(lone: Lone) -> None:
    file = lone.root / lone.names()[0] / "rank-0.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    found = asked("verify", str(lone.root), code=ExitCode.DATA)
    assert states(found)[-1] == (1, "damaged")
    (damage,) = found["checkpoints"][-1]["damages"]
    assert damage.startswith(f"{file}: head.0.0.optimizer: ")
    said = pacekeeper("checkpoint", "verify", str(lone.root))
    assert said.returncode == ExitCode.DATA and damage in said.stdout
    assert states(asked("ls", str(lone.root)))[-1] == (1, "complete"), "a list reads no blocks"


def test_what_a_job_could_not_read_is_listed_as_rejected(lone: Lone) -> None:
    file = lone.root / lone.names()[1] / "rank-0.safetensors"
    file.write_bytes(b"")
    lone.restore()
    assert states(asked("ls", str(lone.root)))[1] == (2, "rejected")


def test_a_torn_manifest_is_seen_by_the_list_already(lone: Lone) -> None:
    path = lone.root / lone.names()[1] / MANIFEST_FILE
    path.write_text(path.read_text()[:99])
    found = asked("ls", str(lone.root))
    assert states(found)[1] == (2, "damaged")
    assert MANIFEST_FILE in found["checkpoints"][1]["damages"][0]


def test_one_is_shown_by_its_path_and_of_a_directory_the_newest_complete_one(lone: Lone) -> None:
    shown = asked("show", str(lone.root))
    assert (shown["job"], shown["step"], shown["last_loss"]) == ("tiny", 2, 1.5)
    assert shown["identity"]["settings.seed"] == 0
    assert len({piece["name"] for piece in shown["pieces"]}) == 6
    older = str(lone.root / lone.names()[0])
    assert asked("show", older)["path"] == older


def test_what_is_useless_goes_when_asked_and_what_may_be_written_now_stays(lone: Lone) -> None:
    names = lone.names()
    said = asked("gc", str(lone.root), "--keep", "1", "--dry-run")
    assert said == {"removed": [names[0]], "files": [], "dry_run": True}
    assert lone.names() == names
    assert asked("gc", str(lone.root), "--keep", "1")["removed"] == [names[0]]
    assert lone.names() == names[1:]


def test_of_a_partial_one_the_list_says_how_old_it_is_and_what_it_would_lose(
    tmp_path: Path,
) -> None:
    one = Lone(tmp_path, replace(TINY, experts_per_checkpoint=1))
    one.grow(2)
    newest, oldest = asked("ls", str(one.root))["checkpoints"]
    assert (oldest["oldest_step"], oldest["lost_tokens"]) == (1, 0)
    assert newest["oldest_step"] == 1 and newest["lost_tokens"] > 0
    assert newest["own_bytes"] < newest["size_bytes"]


@pytest.mark.parametrize("word", ["ls", "verify", "show", "gc"])
def test_where_there_is_none_that_is_said(word: str, tmp_path: Path) -> None:
    done = pacekeeper("checkpoint", word, str(tmp_path / "none"))
    assert done.returncode == ExitCode.DATA
    assert str(tmp_path / "none") in done.stderr and "Traceback" not in done.stderr
