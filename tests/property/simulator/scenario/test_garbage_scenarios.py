"""Whatever a scenario says: it is played and every second told, or refused in one line."""

import json
from copy import deepcopy
from math import inf, isclose, nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.cli.analysis.simulate import simulation_document
from pacekeeper.core.errors import ConfigError, DataError
from pacekeeper.simulator.engine.statistics import summarize
from pacekeeper.simulator.scenario.loader import read_scenario, run_scenario
from support.examples import examples
from support.scenarios import Tables, small_tables, written

ODD: tuple[Any, ...] = (
    *(0, -1, 1, 3, 2**62, 10**400, 0.0, -0.0, -1.0, 0.5, 1.0, 1e-320, 1e-300, 1e300, inf, nan),
    *("", "x", "[/red]", "$x^$", "stop", "drawn", "spot", "faults", "random", "\0", ".", "/"),
    *(True, [], [1], {}, {"a": 1}, {"kind": "pacekeeper"}, {"kind": "none", "group_size": 9}),
)


@st.composite
def garbage(draw: st.DrawFn) -> Tables:
    """The small scenario with one to three values odd, gone or new."""
    tables = small_tables()
    for _ in range(draw(st.integers(1, 3))):
        at = tables
        for _ in range(draw(st.integers(1, 3))):
            key = draw(st.sampled_from([*at, "new", ""]))
            if not isinstance(at.get(key), dict) or draw(st.integers(0, 9)) == 0:
                break
            at = at[key]
        if key in at and draw(st.booleans()):
            del at[key]
        else:
            at[key] = deepcopy(draw(st.sampled_from(ODD)))
    return tables


@settings(max_examples=examples(300), deadline=None)
@given(tables=garbage())
def test_a_garbage_scenario(tables: Tables) -> None:
    with TemporaryDirectory() as folder:
        path = written(Path(folder, "garbage.toml"), tables)
        try:
            known = read_scenario(path)
        except (ConfigError, DataError) as error:
            for line in str(error).splitlines():  # one for each problem of the file
                assert "garbage.toml" in line or folder in line, error
            return
        found = run_scenario(known, seeds=1)
    for (outcome,) in found.values():
        assert isclose(sum(outcome.spent_s.values()), outcome.duration_s, rel_tol=1e-9)
        assert 0.0 <= outcome.samples <= outcome.fluid_samples * (1.0 + 1e-9)
    json.dumps(simulation_document(known, found, summarize(found)), allow_nan=False)
