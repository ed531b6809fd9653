"""The file of tokens: for its owner only, replaced whole, followed while it changes."""

import os
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from pacekeeper.cli.admin.tokens import command
from pacekeeper.controller.api.auth.rbac import Role
from pacekeeper.controller.api.auth.tokens import (
    TokenFile,
    TokenRecord,
    authenticate_token,
    change_tokens,
    read_tokens,
)
from pacekeeper.core.errors import ConfigError


def record(number: int) -> TokenRecord:
    return TokenRecord(
        token_id=f"{number:08x}", secret_sha256="0" * 64, role=Role.VIEWER, name="x",
        created_unix_s=0.0, expires_unix_s=4e9,
    )  # fmt: skip


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    change_tokens(path, lambda _: (record(1),))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 600"):
            read_tokens(path)


def test_changes_are_followed_and_a_broken_file_lets_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    change_tokens(path, lambda _: (record(1),))
    tokens = TokenFile(path)
    assert len(tokens.records()) == 1
    change_tokens(path, lambda before: (*before, record(2)))
    assert len(tokens.records()) == 2
    path.write_text("nonsense")
    assert tokens.records() == ()
    path.unlink()
    assert tokens.records() == ()
    change_tokens(path, lambda before: (*before, record(3)))
    assert [one.token_id for one in tokens.records()] == ["00000003"]


def test_a_file_of_others_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("my notes")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="tokens: "):
        change_tokens(path, lambda before: (*before, record(1)))
    assert path.read_text() == "my notes"
    assert os.listdir(tmp_path) == ["tokens"]


def test_a_token_is_made_shown_once_listed_and_taken_back(tmp_path: Path) -> None:
    path, runner = tmp_path / "tokens", CliRunner()
    made = runner.invoke(command, ["add", "--file", str(path), "operator", "ann"])
    assert made.exit_code == 0, made.output
    token = made.output.strip()
    found = authenticate_token(token, read_tokens(path), 0.0)
    assert (found.role, found.name) == (Role.OPERATOR, "operator/ann by token")
    assert token.split(".")[2] not in path.read_text()
    listed = runner.invoke(command, ["ls", "--file", str(path)])
    assert "operator ann (30.0 days left)" in listed.output
    number = token.split(".")[1]
    gone = runner.invoke(command, ["revoke", "--file", str(path), number])
    assert gone.exit_code == 0, gone.output
    assert authenticate_token(token, read_tokens(path), 0.0).role is Role.ANONYMOUS
    again = runner.invoke(command, ["revoke", "--file", str(path), number])
    assert isinstance(again.exception, ConfigError)
