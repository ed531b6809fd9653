"""The committed gRPC code is what the sources give, and the sources keep the house rules of buf."""

import shutil
import subprocess
import sys

import pytest

from pacekeeper.protos import generate
from support.tree import ROOT

SOURCES = sorted((ROOT / "protos").rglob("*.proto"))


def test_the_generated_code_is_current() -> None:
    assert generate.stale() == [], "run `make protos` and commit what it writes"


def test_a_change_of_the_sources_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = generate.generate()
    name = sorted(made)[0]
    monkeypatch.setattr(generate, "generate", lambda: {**made, name: made[name] + "# new\n"})
    assert generate.stale() == [name]
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    assert generate.main() == 1


def test_every_source_is_generated_and_nothing_is_left_over() -> None:
    stems = {path.stem for path in SOURCES}
    assert stems
    there = {path.name for path in (ROOT / "protos").iterdir() if "_pb2" in path.name}
    endings = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")
    assert there == {stem + ending for stem in stems for ending in endings}


def test_buf_has_nothing_to_say() -> None:
    buf = shutil.which("buf")
    if buf is None:
        pytest.skip("no buf on the PATH: the lint of the .proto files runs where it is installed")
    done = subprocess.run([buf, "lint"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
