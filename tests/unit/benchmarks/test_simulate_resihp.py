"""What `benchmarks.simulate_resihp` fits, and what it makes of what it found."""

from io import StringIO
from typing import Any

import numpy as np
import pytest
from benchmarks.resihp_paper import (
    DROPS,
    LARGE_OVER,
    PAPERS,
    baseline_step_s,
    fitted_flops,
    job_of,
    slow_speed,
)
from benchmarks.resihp_tables import show_rates, summary
from benchmarks.simulate_resihp import ROWS, deviation, paper_limit, slow_history
from rich.console import Console

from pacekeeper.simulator.cluster.history import SpeedChanged
from pacekeeper.simulator.jobs.pipeline_assignment import Planned

PAPER = PAPERS[0]


def row(**more: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "fluid": {"ours": 0.96},
        "fluid_min": 0.9,
        "is_won": True,
        "is_whole_won": True,
        "off": dict.fromkeys(("greyhound", "resihp", "resihp_over_greyhound"), 0.1),
    }
    return known | more


def met(*rows: dict[str, Any], large: dict[str, float] | None = None) -> bool:
    won = {"is_won": True}
    return bool(summary(rows, [won], [won], large or LARGE_OVER)["met"])


def test_the_one_number_that_is_fitted_explains_the_printed_fault_free_rate() -> None:
    job = job_of(PAPER.case, fitted_flops(PAPER, ROWS), ROWS)
    rate = job.samples_per_step(Planned(partition=job.baseline)) / baseline_step_s(job)
    assert rate == pytest.approx(PAPER.samples_per_s, rel=2e-3)


@pytest.mark.parametrize("severity", DROPS)
def test_a_severity_is_what_it_costs_the_job_that_does_nothing(severity: str) -> None:
    job = job_of(PAPER.case, 1e14, ROWS)
    speed = slow_speed(job, 9, DROPS[severity])
    kept = baseline_step_s(job) / baseline_step_s(job, {9: speed})
    assert kept == pytest.approx(1.0 - DROPS[severity], abs=2e-3)
    (change,) = [
        c for c in slow_history(job, 9, speed, 10.0).changes if isinstance(c, SpeedChanged)
    ]
    assert (change.at_s, change.node, change.speed) == (0.0, 9, speed)


def test_deviations_are_from_the_nearer_end_of_what_is_printed() -> None:
    assert deviation(1.2, 1.1, 1.3) == 0.0
    assert deviation(0.9, 1.0, 1.3) == pytest.approx(-0.1)
    assert deviation(2.6, 1.0, 1.3) == pytest.approx(1.0)
    assert paper_limit("medium", [{"speed": 0.2}], 4) == pytest.approx(0.8 / 0.45)


def test_bars_are_met_by_all_cells_together_and_missed_by_any_of_them() -> None:
    assert met(row())
    assert not met(row(), row(is_won=False))
    assert not met(row(fluid={"ours": 0.94}))
    assert not met(row(), row(fluid_min=0.87))
    assert not met(row(), large=LARGE_OVER | {"oobleck": 1.0})
    part = summary([row()], [], [], dict.fromkeys(LARGE_OVER, 1.0), is_whole=False)
    assert part["met"]  # a short span of the large job has too few faults to say
    found = summary([row(), row(off=row()["off"] | {"resihp": 0.2})], [], [], LARGE_OVER)
    assert found["resihp_within_15"] == 1 and found["greyhound_within_15"] == 2
    assert np.isclose(found["median_fluid_fraction"], 0.96)


def test_rates_of_faults_are_shown_beside_what_any_plan_could_reach() -> None:
    row = {"every_h": 2.0, "mended_h": 4.0, "lost": 0.02, "resihp": 1.1, "recycle": 1.3,
           "oobleck": 1.2, "resihp_recycle": 1.18, "resihp_oobleck": 1.09, "most_recycle": 1.35,
           "most_oobleck": 1.25}  # fmt: skip
    console = Console(width=180, file=StringIO())
    show_rates([row], console)
    assert isinstance(console.file, StringIO)
    cells = [cell.strip() for cell in console.file.getvalue().split("\u2502")]
    assert cells[1:9] == [
        "2 h", "4 h", "2.0%", "1.100", "1.300 (1.350)", "1.180", "1.200 (1.250)", "1.090",
    ]  # fmt: skip
