"""Ranks join a job that is watched: the wider layout is observed, nobody is judged too early."""

from dataclasses import replace

from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.resize.grow import grow
from support.machine_driver import (
    FIRST,
    FLOOR,
    QUICK,
    WARM,
    Driver,
    applied,
    attachment,
    started,
    step,
    train,
)

WIDER = range(5)


def wider(generation: int) -> Layout:
    return grow(FIRST, newcomers=[4], generation=generation, floor=FLOOR)


def join(driver: Driver, layout: Layout) -> None:
    """Rank 4 attaches on a node of its own; then all say what they run."""
    newcomer = replace(attachment(0), rank=4, world_size=5, pid=104)
    driver.agent("node-2")
    driver.report(attached=[newcomer], layouts=[layout], node="node-2")
    driver.report(*applied(layout))


def joined() -> Driver:
    driver = started(QUICK)
    train(driver, 0, WARM)
    join(driver, wider(2))
    return driver


def steps_of_five(driver: Driver, first: int, end: int, *, slow: int | None = None) -> None:
    for number in range(first, end):
        driver.now_s += 0.2
        driver.report(*step(number, ranks=WIDER, generation=2, slow=slow, slowdown=3.0))


def test_ranks_beyond_the_first_world_are_known_and_their_layout_is_observed() -> None:
    driver = joined()
    assert driver.job.layouts.current == wider(2)
    assert driver.job.living == tuple(WIDER)
    assert "ranks 4 joined; 0-4 go on" in driver.texts
    assert not driver.job.incidents, "nobody died"


def test_a_newcomer_may_be_slow_while_it_settles() -> None:
    driver = joined()
    skipped = QUICK.detector.skip_steps
    steps_of_five(driver, WARM, WARM + skipped, slow=4)
    assert driver.job.detection.measured.of(4).observed_s is None, "not known yet"
    assert driver.job.detection.measured.of(3).observed_s is not None
    steps_of_five(driver, WARM + skipped, WARM + skipped + 20)
    assert not driver.job.incidents
    assert driver.job.detection.measured.of(4).observed_s is not None


def test_a_newcomer_that_stays_slow_is_named() -> None:
    driver = joined()
    steps_of_five(driver, WARM, WARM + 12, slow=4)
    assert [incident.finding.rank for incident in driver.job.open_incidents] == [4]


def test_a_plan_and_a_way_home_from_before_a_join_are_out_of_date() -> None:
    driver = started(QUICK)
    train(driver, 0, WARM)
    train(driver, WARM, WARM + 12, slow=2)
    assert driver.job.plan.desired is not None and driver.job.layouts.baseline is not None
    join(driver, wider(driver.job.layouts.newest_generation + 1))
    assert driver.job.layouts.baseline is None, "it has no part for rank 4"
    driver.tick()
    assert driver.job.plan.desired is None
