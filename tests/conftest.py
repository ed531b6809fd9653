"""What holds for all tests: one switch, four profiles, and nothing that they leave behind."""

import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from support.examples import DEFAULT, SHARES
from support.leftovers import left_behind
from support.tree import ROOT

RUNS = ROOT / "runs"

# As in the controller: before anybody imports numpy. Its threads only wait for each other here.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Shared runners are slow at times; a wish is broken by a value, never by a clock.
settings.register_profile("pacekeeper", deadline=None, print_blob=True)
# Where all is run, a change is judged by what it changed: the same examples each time, and any
# counter-example will do, for to look for a smaller one takes up to 5 minutes.
for name in ("fast", "whole"):
    settings.register_profile(
        name,
        parent=settings.get_profile("pacekeeper"),
        derandomize=True,
        max_examples=math.ceil(DEFAULT * SHARES[name]),
        phases=(Phase.explicit, Phase.generate, Phase.target),
    )
settings.register_profile(
    "deep",
    parent=settings.get_profile("pacekeeper"),
    max_examples=math.ceil(DEFAULT * SHARES["deep"]),
)
settings.load_profile("pacekeeper")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite the transcripts below tests/golden; review them as a diff",
    )


def pytest_configure(config: pytest.Config) -> None:
    """What is temporary lies in a folder of this process, with a short path: sockets lie there."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # `tmp_path` stays
    folder = tempfile.mkdtemp(prefix="pk-")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    # After the fork server's socket, which lies in it, too (-100).
    Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-200)


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """No process, no file: a test that leaves some is found here, at the end of them all."""
    was_there = RUNS.exists()
    yield
    left = left_behind(Path(tempfile.gettempdir()))
    if RUNS.exists() and not was_there:  # where a demo writes that is told nothing else
        left.append(str(RUNS))
    assert not left, "\n".join(left)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a PostgreSQL server; skips where there is none (tests/support/postgres.py)."""
    from support.postgres import server_url

    with server_url() as url:
        yield url


@pytest.fixture
def postgres_url(postgres_server: str) -> str:
    """The URL of an empty PostgreSQL database."""
    from support.postgres import new_database

    return new_database(postgres_server)


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    """Where a new store may be: what holds for a store holds on both engines."""
    if request.param == "sqlite":
        return tmp_path / "store"
    return str(request.getfixturevalue("postgres_url"))
