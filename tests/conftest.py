"""One switch and one profile for all tests: golden files are rewritten on request only."""

import pytest
from hypothesis import settings

# Shared runners are slow at times; a wish is broken by a value, never by a clock.
settings.register_profile("pacekeeper", deadline=None, print_blob=True)
settings.load_profile("pacekeeper")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite the transcripts below tests/golden; review them as a diff",
    )
