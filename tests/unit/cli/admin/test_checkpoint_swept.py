"""`pacekeeper checkpoint` beside a job that removes the oldest as it goes on."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pacekeeper.cli.admin.checkpoint import command
from pacekeeper.core.checkpoint.manifest import MANIFEST_FILE
from pacekeeper.core.errors import ExitCode
from pacekeeper.trainer.checkpoint.storage import LocalStorage
from support.trainees import Lone


@pytest.fixture
def lone(tmp_path: Path) -> Lone:
    """Two complete checkpoints, of steps 1 and 2."""
    one = Lone(tmp_path)
    one.grow(2)
    return one


def verified(path: Path) -> tuple[int, Any]:
    done = CliRunner().invoke(command, ["verify", str(path), "--json"])
    rows = json.loads(done.stdout)["checkpoints"]
    return done.exit_code, [(row["step"], row["state"], row["damages"]) for row in rows]


@pytest.mark.parametrize("read", [MANIFEST_FILE, "rank-0.safetensors"])
def test_one_that_goes_while_it_is_read_is_no_damage(
    read: str, lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    oldest, truly = lone.names()[0], LocalStorage.read

    def removed_before(self: LocalStorage, path: str, *place: Any) -> bytes:
        if path == f"{oldest}/{read}":
            self.remove(oldest)
        return truly(self, path, *place)

    monkeypatch.setattr(LocalStorage, "read", removed_before)
    assert verified(lone.root) == (0, [(2, "verified", []), (1, "removed", [])])


def test_one_that_is_named_and_goes_meanwhile_is_not_what_was_hoped_for(
    lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    oldest = lone.names()[0]
    monkeypatch.setattr(LocalStorage, "size_bytes", lambda self, path: self.remove(oldest) or 0)
    assert verified(lone.root / oldest) == (ExitCode.DATA, [(1, "removed", [])])
