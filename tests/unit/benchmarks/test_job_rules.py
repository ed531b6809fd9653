"""The rules of others on the step times of a job: quiet if nothing changes, loud if it does."""

import numpy as np
import pytest
from benchmarks.job_rules import JOB_RULES, SKIPPED_STEPS, alarms_of
from benchmarks.step_runs import Run

from pacekeeper.predictor.recorded.trace import StepTable, Trace

NUM_STEPS = 400


def trace_of(took_s: np.typing.NDArray[np.float64]) -> Trace:
    unknown = np.full(took_s.size, np.nan)
    steps = StepTable(
        step=np.arange(took_s.size), duration_s=took_s, tokens=unknown, sum_len_squared=unknown
    )
    return Trace(name="t", source="steps", workers=(), steps=steps)


def run_of(slowdown: float, *, replicates: int = 2) -> tuple[Run, np.typing.NDArray[np.float64]]:
    """Steady, then slow for good from step 250 on, beside steady runs."""
    random = np.random.default_rng(0)
    took_s = 0.1 * random.lognormal(0.0, 0.005, NUM_STEPS)
    steady = trace_of(took_s)
    slow_s = np.where(np.arange(NUM_STEPS) >= 250, slowdown, 1.0) * took_s
    others = (steady,) * replicates
    return Run(name="r", record="r", trace=trace_of(slow_s), replicates=others), slow_s


@pytest.mark.parametrize("name", JOB_RULES)
def test_a_steady_job_is_not_called_slow(name: str) -> None:
    assert alarms_of(JOB_RULES[name], *run_of(1.0)) == []


@pytest.mark.parametrize("name", JOB_RULES)
def test_a_job_that_takes_half_as_long_again_is_called_slow_in_time(name: str) -> None:
    alarms = alarms_of(JOB_RULES[name], *run_of(1.5))
    assert alarms and 250 <= alarms[0][0] < 350


def test_a_gate_is_not_asked_without_what_it_compares_with() -> None:
    gate = JOB_RULES["resihp, given the other runs"]
    assert alarms_of(gate, *run_of(1.5, replicates=0)) is None
    assert alarms_of(gate, *run_of(1.2)) == [], "below 1.25 nothing is followed"


def test_the_first_steps_are_left_out() -> None:
    run, took_s = run_of(1.0)
    took_s[:SKIPPED_STEPS] *= 5.0
    assert alarms_of(JOB_RULES["scout temporal"], run, took_s) == []
