"""A small job in mode "approve" whose plan waits for a person."""

from dataclasses import replace

from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.proposals import Proposal
from support.machine_driver import QUICK, WARM, Driver, started, train

STANDS_S = 900.0  # as the settings say
ASKED = replace(QUICK, policy=PolicyConfig(mode="approve", approve="all"))


def asking(config: ControllerConfig = ASKED) -> Driver:
    """Rank 2 is slow, and people are asked about the plan for it."""
    driver = started(config)
    train(driver, 0, WARM)
    train_until_proposed(driver)
    return driver


def train_until_proposed(driver: Driver, *, within_steps: int = 16) -> None:
    """Rank 2 is slow; a tick in each step."""
    for _ in range(within_steps):
        if driver.job.plan.open_proposal is not None:
            return
        driver.tick(0.1)
        train(driver, driver.job.progress.step + 1, driver.job.progress.step + 2, slow=2)
    raise AssertionError("nothing is proposed")


def opened(driver: Driver) -> Proposal:
    """The proposal that is open."""
    proposal = driver.job.plan.open_proposal
    assert proposal is not None, "a plan is proposed"
    return proposal
