"""What belongs to the project, by git: tests of conventions and packaging look at nothing else."""

import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "core",
    "agent",
    "predictor",
    "controller",
    "trainer",
    "simulator",
    "cli",
    "protos",
)
GENERATED = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


@cache
def project_files(*, with_new: bool = False) -> tuple[str, ...]:
    """Paths below ROOT that git tracks and that exist; `with_new`: also those it would take.

    Links are left out: they name what stands elsewhere. Skips the test outside a git checkout.
    """
    which = ["--cached", "--others", "--exclude-standard"] if with_new else ["--cached"]
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", *which], cwd=ROOT, capture_output=True, check=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs a git checkout: {error}")
    paths = sorted(set(filter(None, listed.split("\0"))))
    return tuple(p for p in paths if (ROOT / p).is_file() and not (ROOT / p).is_symlink())


def modules() -> tuple[str, ...]:
    """The project's own Python files: all but generated code."""
    return tuple(p for p in project_files() if p.endswith(".py") and not p.endswith(GENERATED))


@cache
def pure_packages() -> tuple[str, ...]:
    """Packages that the import contract keeps pure, as folders below ROOT."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (c for c in contracts["contracts"] if c["name"].startswith("pure packages"))
    return tuple(
        n.removeprefix("pacekeeper.").replace(".", "/") for n in contract["source_modules"]
    )


def is_pure(path: str) -> bool:
    """Must this module do without clock, randomness, I/O, threads, torch, grpc and protos?"""
    return path.startswith(tuple(f"{folder}/" for folder in pure_packages()))
