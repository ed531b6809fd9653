"""The alert rules ask for series, labels and values that the controller really tells."""

import re
from collections.abc import Mapping

import pytest

from pacekeeper.controller.metrics import ControllerMetrics
from pacekeeper.core.findings import Blindness, FindingKind
from support.tree import ROOT

SELECTOR = re.compile(r"(pacekeeper_\w+)(?:\{(.*?)\})?")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"(.*?)"')
VALUES: dict[str, set[str]] = {
    "cause": set(map(str, Blindness)),
    "kind": set(map(str, FindingKind)),
}


def rules() -> dict[str, dict[str, str]]:
    """Of each alert its expr, for, severity, summary and description."""
    text = (ROOT / "deploy" / "pacekeeper.alerts.yml").read_text()
    name, *blocks = re.split(r"^ +- alert: *", text, flags=re.MULTILINE)
    fields = (re.findall(r"^ +(\w+): (.+)$", block, flags=re.MULTILINE) for block in blocks)
    assert name.startswith("#")
    return {
        block.split("\n")[0]: dict(own) for block, own in zip(blocks, fields, strict=True)
    }  # fmt: skip


def labels_of_series() -> Mapping[str, set[str]]:
    """Labels by the name of each series that a controller has."""
    told = ControllerMetrics().registry._collector_to_names
    return {
        name: set(getattr(collector, "_labelnames", ()))
        for collector, names in told.items()
        for name in names
    }


@pytest.mark.parametrize("name", rules())
def test_a_rule_asks_for_what_there_is(name: str) -> None:
    told, rule = labels_of_series(), rules()[name]
    selectors = SELECTOR.findall(rule["expr"])
    assert selectors
    known: set[str] = set()
    for series, matchers in selectors:
        assert series in told, f"no such series: {series}"
        known |= told[series]
        for label, values in MATCHER.findall(matchers):
            assert label in told[series]
            assert set(values.split("|")) <= VALUES[label]
    shown = re.findall(r"\$labels\.(\w+)", rule["summary"] + rule["description"])
    assert set(shown) <= known
    assert rule["severity"] in ("warning", "critical")


def test_whatever_makes_a_job_blind_is_an_alert() -> None:
    asked = " ".join(rule["expr"] for rule in rules().values())
    assert 'pacekeeper_job_blind{cause="canary"}' in asked
    assert 'pacekeeper_job_blind{cause!="canary"}' in asked
    assert "pacekeeper_canary_found == 0" in asked
