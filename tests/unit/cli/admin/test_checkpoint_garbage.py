"""`pacekeeper checkpoint` and `--resume auto` where a directory holds what no launch put there."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import click.testing
import pytest

from pacekeeper.cli.common.lazy_group import command as main
from pacekeeper.core.checkpoint.manifest import MANIFEST_FILE, CheckpointId
from pacekeeper.core.errors import ExitCode
from pacekeeper.trainer.checkpoint.reader import ids
from pacekeeper.trainer.checkpoint.storage import LocalStorage, open_storage
from support.trainees import TINY, Lone


def run(*words: str) -> tuple[int, str]:
    """Exit code, and all that was said. No exception but the one that carries the code."""
    found = click.testing.CliRunner().invoke(main, ["checkpoint", *words])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exc_info
    return found.exit_code, found.output


def rows(*words: str, code: int = 0) -> list[dict[str, Any]]:
    exit_code, text = run(*words, "--json")
    assert exit_code == code, text
    found: list[dict[str, Any]] = json.loads(text.splitlines()[-1])["checkpoints"]
    return found


def saved(directory: Path, steps: int = 2) -> Lone:
    lone = Lone(directory)
    lone.grow(steps)
    return lone


def name_of(step: int, run_id: int = 1) -> str:
    return CheckpointId(run_id=run_id, generation=1, step=step).name


@pytest.fixture
def littered(tmp_path: Path) -> Lone:
    """Two complete checkpoints among all sorts of things."""
    lone = saved(tmp_path / "kept")
    root, whole = lone.root, name_of(2)
    (root / name_of(3)).write_text("a file of this name")
    (root / name_of(4) / MANIFEST_FILE).mkdir(parents=True)
    shutil.copytree(root / whole, root / name_of(5))
    manifest = (root / whole / MANIFEST_FILE).read_bytes()
    changed, newer = manifest.replace(b"tiny", b"tuny"), b'{"format":99,"sha256":"","body":{}}'
    for step, data in enumerate((b"", manifest[:99], changed, newer, b"[" * 100_000), 6):
        (root / name_of(step)).mkdir()
        (root / name_of(step) / MANIFEST_FILE).write_bytes(data)
    (root / name_of(11)).symlink_to("nowhere")
    (root / name_of(12)).symlink_to(name_of(12))
    (root / name_of(1, run_id=9_007_199_254_740_991)).mkdir()
    (root / ("9" * 40 + "-g0001-step00000001")).mkdir()
    (root / "\u0661\u0660".join(["1" * 13 + "-g", "01-step00000001"])).mkdir()
    (root / "lost+found").mkdir()
    (root / "a\nb\x1b[31m").mkdir()
    (root / os.fsdecode(b"\xff\xfe")).mkdir()
    inside = root / name_of(13) / os.fsdecode(b"\xff\n")
    inside.mkdir(parents=True)
    shutil.copytree(root, tmp_path / "kept" / os.fsdecode(b"job\xff[bold]"), symlinks=True)
    return lone


def test_whatever_lies_there_each_command_ends_with_an_answer(littered: Lone) -> None:
    paths = (littered.root.parent, *sorted(littered.root.iterdir()), littered.root)
    for words in (("ls",), ("verify",), ("show",), ("gc", "--dry-run"), ("gc",)):
        for path in paths:
            for options in ([], ["--json"]):
                code, said = run(*words, *options, str(path))
                assert code in (0, ExitCode.DATA, ExitCode.HOST) and said
                assert "\x1b" not in said, "a name that colours the terminal"


def test_what_is_whole_is_told_from_what_is_not(littered: Lone) -> None:
    found = {Path(row["path"]).name: row for row in rows("verify", str(littered.root), code=9)}
    assert [name for name, row in found.items() if row["state"] == "verified"] == [
        name_of(2), name_of(1),
    ]  # fmt: skip
    damaged = {name for name, row in found.items() if row["state"] == "damaged"}
    assert damaged == {name_of(step) for step in (4, 5, 6, 7, 8, 9, 10)}
    assert found[name_of(5)]["damages"], "a copy under another name"


def test_the_newest_whole_one_is_resumed_from(littered: Lone) -> None:
    other = Lone(littered.root.parent, run_id=2)
    other.restore()
    assert other.step == 2


def test_a_job_saves_on_and_sweeps_beside_it(littered: Lone) -> None:
    storage = open_storage(str(littered.root))
    other = Lone(littered.root.parent, run_id=2)
    other.restore()
    other.grow(3)
    complete = [one.step for one in ids(storage) if one.run_id == 2]
    assert complete == [5, 4], "two are kept"
    assert (littered.root / "lost+found").is_dir(), "what is no checkpoint's is let alone"


def test_one_that_is_named_from_within_its_directory_is_judged_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone = saved(tmp_path)
    (lone.root / name_of(3)).mkdir()
    monkeypatch.chdir(lone.root)
    assert run("verify", name_of(2))[0] == 0
    assert run("verify", name_of(3))[0] == ExitCode.DATA
    assert run("verify", "./" + name_of(3) + "/")[0] == ExitCode.DATA


@pytest.mark.parametrize("path", ["", "/", "//", "file://", "file:///"])
def test_a_path_that_is_all_slashes_is_not_the_present_directory(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone = saved(tmp_path, 3)
    monkeypatch.chdir(lone.root)
    before = lone.names()
    for words in (("gc", "--keep", "1"), ("ls",)):
        code, said = run(*words, path)
        assert code in (ExitCode.DATA, ExitCode.HOST) and name_of(3) not in said
    assert lone.names() == before


def test_a_directory_that_is_closed_to_us_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a job beside ours, and of one checkpoint, made by somebody else."""
    lone = saved(tmp_path)
    (tmp_path / "lost+found").mkdir()
    names = LocalStorage.names

    def closed(self: LocalStorage, path: str) -> list[str]:
        if path == name_of(2) or self.root.endswith("lost+found"):
            raise PermissionError(13, "Permission denied")
        return names(self, path)

    monkeypatch.setattr(LocalStorage, "names", closed)
    code, said = run("ls", str(tmp_path))
    assert code == 0 and "lost+found" in said
    found = rows("verify", str(lone.root), code=ExitCode.DATA)
    assert [row["state"] for row in found] == ["unreadable", "verified"]
    monkeypatch.setattr(LocalStorage, "read", refused_in(name_of(2)))
    other = Lone(tmp_path, run_id=2)
    other.restore()
    assert other.step == 1


def refused_in(name: str) -> Any:
    read = LocalStorage.read

    def refused(self: LocalStorage, path: str, *span: Any) -> bytes:
        if path.startswith(name):
            raise PermissionError(13, "Permission denied")
        return read(self, path, *span)

    return refused


def test_a_checkpoint_behind_a_link_goes_with_its_link(tmp_path: Path) -> None:
    lone = saved(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    (lone.root / name_of(1)).rename(elsewhere)
    (lone.root / name_of(1)).symlink_to(elsewhere)
    assert run("verify", str(lone.root))[0] == 0
    assert run("gc", "--keep", "1", str(lone.root))[0] == 0
    assert lone.names() == [name_of(2)] and list(elsewhere.iterdir()) == []


def test_numbers_that_no_vote_could_carry_name_no_checkpoint() -> None:
    most = 1 << 53
    assert CheckpointId.of_name(name_of(1, run_id=most)) is not None
    assert CheckpointId.of_name(f"{most + 1}-g0001-step00000001") is None
    assert CheckpointId.of_name("1" * 5000 + "-g0001-step00000001") is None


def test_another_jobs_directory_shows_nothing_of_it_in_ours(tmp_path: Path) -> None:
    """Its newest is moved into ours by hand: another model is refused, ours is taken."""
    from dataclasses import replace

    lone = saved(tmp_path)
    theirs = Lone(tmp_path, replace(TINY, job="other"), run_id=5, width=16)
    theirs.grow(1)
    shutil.copytree(theirs.root / theirs.names()[0], lone.root / theirs.names()[0])
    other = Lone(tmp_path, run_id=6)
    other.restore()
    assert other.step == 2
    assert [row["state"] for row in rows("verify", str(lone.root))] == ["verified"] * 3


def test_gc_of_what_is_above_jobs_names_one_of_them(tmp_path: Path) -> None:
    """`ls` of the same path shows complete ones: what is there is not the question."""
    lone = saved(tmp_path)
    code, text = run("gc", str(tmp_path))
    assert code == ExitCode.DATA and f"'{lone.root}'" in text
