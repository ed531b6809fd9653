"""What does not pass `ingest_scale`."""

from collections.abc import Callable
from typing import Any

import pytest
from benchmarks.ingest_scale import is_met


def result() -> dict[str, Any]:
    """A run of 10,000 agents that passes."""
    storms = ("attach", "connections_break", "controller_killed")
    back = {"are_back": True, "all_acknowledged": True, "back_s": 30.0, "missed": 0.0}
    return {
        "agents": 10_000,
        "steady": {"core_of_both": 0.7, "reports": 60_000, "taken": 60_000.0},
        "killed_ranks": {"asked": 1000, "lost": 0, "doubled": 0},
        **{name: dict(back) for name in storms},
    }


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: r["steady"].update(core_of_both=0.95),
        lambda r: (r.update(agents=1000), r["steady"].update(core_of_both=0.5)),
        lambda r: r["steady"].update(taken=56_000.0),
        lambda r: r["attach"].update(are_back=False),
        lambda r: r["connections_break"].update(back_s=60.1),
        lambda r: r["controller_killed"].update(missed=1.0),
        lambda r: r["controller_killed"].update(all_acknowledged=False),
        lambda r: r["killed_ranks"].update(lost=1),
        lambda r: r["killed_ranks"].update(doubled=1),
        lambda r: r["killed_ranks"].update(asked=0),
    ],
)
def test_one_bar_that_is_not_kept_fails_the_run(spoil: Callable[[dict[str, Any]], Any]) -> None:
    assert is_met(result())
    spoil(spoilt := result())
    assert not is_met(spoilt)
