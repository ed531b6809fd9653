"""A row of the store is the incident that was stored, or no incident."""

import json
from typing import Any

import pytest

from pacekeeper.controller.storage.rows import incident_of, incident_row
from pacekeeper.core.incidents.findings import Finding, FindingKind, Incident, Tier
from pacekeeper.core.incidents.rank_failures import RankFailures

INCIDENT = Incident(
    incident_id=7,
    job="moe",
    finding=Finding(
        kind=FindingKind.DEATH,
        tier=Tier.CONFIRMED,
        rank=3,
        slowdown=float("inf"),
        onset_step=1,
        step=1,
        reason="why",
    ),
    opened_unix_s=9.0,
    rank_failures=(
        RankFailures(ranks=((0, 2), (4, 9)), reason="r", step=1, unix_s=9.0),
        RankFailures(
            ranks=((3, 3),), reason="q", step=1, unix_s=9, closed_unix_s=10.0, closed_step=2
        ),
    ),
    nodes=("a", "b"),
)


def test_it_comes_back_as_it_was() -> None:
    assert incident_of(incident_row(INCIDENT)) == INCIDENT


@pytest.mark.parametrize(
    "deaths",
    [
        [[[[5, 2]], "r", 1, 9.0, None, None]],
        [[[[4, 9], [0, 2]], "r", 1, 9.0, None, None]],
        [[[[0, 2], [3, 4]], "r", 1, 9.0, None, None]],
        [[[[0, 1 << 30]], "r", 1, 9.0, None, None]],
        [[[[0, "2"]], "r", 1, 9.0, None, None]],
        [[[[0, 2]], 5, 1, 9.0, None, None]],
        [[[[0, 2]], "r", -1, 9.0, None, None]],
        [[[[0, 2]], "r", 1, "9", None, None]],
        [[[[0, 2]], "r", 1, 9.0, None, 2.5]],
        [[[[0, 2]], "r", 1, 9.0]],
        [7],
        {"0": 2},
    ],
)
def test_what_is_no_death_is_damage(deaths: Any) -> None:
    row = {**incident_row(INCIDENT), "rank_failures": json.dumps(deaths)}
    with pytest.raises((ValueError, TypeError)):
        incident_of(row)


@pytest.mark.parametrize("nodes", [[1], "a", {"a": 1}])
def test_what_is_no_list_of_names_is_damage(nodes: Any) -> None:
    row = {**incident_row(INCIDENT), "nodes": json.dumps(nodes)}
    with pytest.raises(ValueError):
        incident_of(row)
