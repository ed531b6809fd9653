"""One switch and one profile for all tests: golden files are rewritten on request only."""

import os

import pytest
from hypothesis import settings

# As in the controller: before anybody imports numpy. Its threads only wait for each other here.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Shared runners are slow at times; a wish is broken by a value, never by a clock.
settings.register_profile("pacekeeper", deadline=None, print_blob=True)
settings.load_profile("pacekeeper")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite the transcripts below tests/golden; review them as a diff",
    )
