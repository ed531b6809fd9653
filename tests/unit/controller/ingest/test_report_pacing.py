"""How often agents report, by the size of their fleet."""

import pytest

from pacekeeper.controller.ingest.report_pacing import pacing_for


@pytest.mark.parametrize(
    ("num_agents", "interval_s", "spread_s"),
    [(0, 1.0, 0.0), (1, 1.0, 0.003), (2000, 1.0, 6.0), (5000, 2.5, 15.0), (10_000, 5.0, 30.0)],
)
def test_the_interval_and_the_spread_grow_with_the_fleet(
    num_agents: int, interval_s: float, spread_s: float
) -> None:
    pacing = pacing_for(num_agents)
    assert pacing.report_interval_s == interval_s
    assert pacing.reconnect_spread_s == pytest.approx(spread_s)


@pytest.mark.parametrize(
    ("before", "now", "is_material"),
    [(0, 1, False), (0, 300, False), (0, 500, True), (2000, 2200, False), (10_000, 8000, True)],
)
def test_only_a_material_change_is_sent_to_all(before: int, now: int, is_material: bool) -> None:
    assert pacing_for(now).differs_from(pacing_for(before)) == is_material
    assert pacing_for(before).differs_from(pacing_for(now)) == is_material
