"""The table of a simulation for people."""

import re
from dataclasses import replace

from pacekeeper.cli.analysis.simulate_text import COLUMNS, summary_cells
from pacekeeper.simulator.engine.event_loop import SimulationResult
from pacekeeper.simulator.engine.statistics import summarize
from pacekeeper.simulator.policies.base import Use

OUTCOME = SimulationResult(
    policy="x",
    seed=0,
    duration_s=10.0,
    samples=20.0,
    fluid_samples=40.0,
    steps=5,
    spent_s=dict.fromkeys(Use, 0.0) | {Use.TRAINED: 10.0},
    restarts=3,
    needless_restarts=2,
    reconfigurations=0,
    copied_bytes=7 * 10**9,
    points=((0.0, 0.0), (10.0, 20.0)),
    decisions=(),
)


def test_all_cells_are_means_of_all_seeds() -> None:
    (row,) = summarize({"x": [OUTCOME, replace(OUTCOME, restarts=2, needless_restarts=1)]})
    numbers = [re.findall(r"[\d.]+", cell) for cell in summary_cells(row)]
    means = [["2.0", "0.0"], ["1.00", "0.00"], ["50.0", "0.0"], ["2.5", "1.5"], ["0.0"], ["7"]]
    assert numbers == [[], *means] and len(COLUMNS) == len(numbers)
    (alone,) = summarize({"x": [replace(OUTCOME, needless_restarts=0)]})
    assert summary_cells(alone)[1:5] == ("2.0", "1.00", "50.0%", "3.0")
