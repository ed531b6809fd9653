"""How many examples a property draws and seeds a simulation has: few in `make test`, else many.

Hypothesis profiles (tests/conftest.py): `pacekeeper` when a developer runs some tests; `whole` in
`make test` and `fast` in `make test-fast`, the same examples each time; `deep` in `make stress`,
other examples each time.
"""

import math

import pytest
from _pytest.mark import ParameterSet
from hypothesis import settings

SHARES = {"fast": 0.1, "whole": 0.25, "deep": 3.0}
LEAST = 5
LEAST_SEEDS = 2
DEFAULT = 100  # Hypothesis' own


def examples(count: int) -> int:
    """Return the number of examples in the current profile.

    Args:
        count: The number in a developer's run; as many as make a broken rule likely to be seen.
    """
    share = SHARES.get(settings.get_current_profile_name(), 1.0)
    return max(math.ceil(count * share), min(count, LEAST))


def seeds(count: int) -> range:
    """Return the seeds of a simulation in the current profile.

    Args:
        count: The number in a developer's run and in `make stress`; `make test` has a share of it.
    """
    share = min(SHARES.get(settings.get_current_profile_name(), 1.0), 1.0)
    return range(max(math.ceil(count * share), min(count, LEAST_SEEDS)))


def stress(*values: object) -> ParameterSet:
    """Return a set of a test's parameters that only `make stress` runs."""
    return pytest.param(*values, marks=pytest.mark.stress)
