"""An incident says whether its fault passed by itself or stayed, in steps since its onset."""

from dataclasses import replace

from pacekeeper.controller.state.events import SaveIncident
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import Incident
from support.machine_driver import QUICK, WARM, Driver, started, step

HORIZON, FAULT = 20, WARM + 4
CONFIG: ControllerConfig = replace(
    QUICK, policy=PolicyConfig(mode="observe", horizon_steps=HORIZON)
)


def after_a_fault(num_steps: int, *, healthy: int = 0) -> tuple[Driver, list[Incident]]:
    """Rank 1 slow for `num_steps`, then well for `healthy`; all that was stored."""
    driver, stored = started(CONFIG), []
    for number in range(FAULT + num_steps + healthy):
        slow = 1 if FAULT <= number < FAULT + num_steps else None
        driver.now_s += 0.2
        driver.report(*step(number, slow=slow))
        stored += [command.incident for command in driver.all_said(SaveIncident)]
    return driver, stored


def test_a_fault_that_passes_within_the_horizon_is_called_transient() -> None:
    driver, _ = after_a_fault(8, healthy=8)
    (incident,) = driver.job.incidents
    (action,) = incident.actions
    assert not incident.is_open
    assert action.startswith("rank 1 is back at its expected time after ")
    assert action.endswith("steps: transient")
    assert incident.closed_step is not None
    assert f"after {incident.closed_step - FAULT + 1} steps" in action


def test_a_fault_that_outlasts_the_horizon_is_called_persistent_once_while_it_is_open() -> None:
    driver, stored = after_a_fault(HORIZON + 10)
    (incident,) = driver.job.open_incidents
    assert incident.is_persistent and len(incident.actions) == 1
    assert sum(i.is_persistent for i in stored) == 1


def test_it_is_not_called_persistent_before() -> None:
    driver, _ = after_a_fault(HORIZON)
    (incident,) = driver.job.open_incidents
    assert not incident.is_persistent and incident.actions == ()


def test_a_persistent_fault_that_ends_says_how_long_it_was() -> None:
    driver, _ = after_a_fault(HORIZON + 10, healthy=8)
    (incident,) = driver.job.incidents
    assert incident.actions[-1].endswith("steps: persistent")
