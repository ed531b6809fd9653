"""The alert rules as they stand in `deploy/`, and how promtool judges them on made-up series."""

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from support.tree import ROOT

FILE = ROOT / "deploy" / "pacekeeper.alerts.yml"
INTERVAL_S = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Series (in promtool's notation, a value each `INTERVAL_S`) with which an alert fires at the
    time `at`, and others, near them, with which it does not. `labels`: of the alert but severity.
    """

    fires: Mapping[str, str]
    quiet: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)
    shown: str = ""  # the value as its summary has it
    at: str = "20m"


@cache
def groups() -> list[dict[str, Any]]:
    """All groups of rules."""
    found: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())["groups"]
    return found


def alerts() -> dict[str, dict[str, Any]]:
    """The alerting rules by name."""
    return {rule["alert"]: rule for g in groups() for rule in g["rules"] if "alert" in rule}


def judged(cases: Mapping[str, Case], folder: Path) -> str:
    """What promtool says of all cases: empty where each fires and does not fire as it should.

    Each is judged with its own rule and those that record: all of them take five times as long.
    """
    files = [_written(name, case, folder) for name, case in cases.items()]
    done = subprocess.run(
        ["promtool", "test", "rules", *files], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode == 0) == ("FAILED" not in done.stdout + done.stderr)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def _written(name: str, case: Case, folder: Path) -> Path:
    """Its file for promtool; JSON is YAML, too."""
    own = [
        {**group, "rules": [r for r in group["rules"] if r.get("alert", name) == name]}
        for group in groups()
    ]
    rules = folder / f"{name}.rules.json"
    rules.write_text(json.dumps({"groups": [group for group in own if group["rules"]]}))
    document = {
        "rule_files": [rules.name],
        "evaluation_interval": f"{INTERVAL_S}s",
        "tests": _tests(name, case),
    }
    file = folder / f"{name}.json"
    file.write_text(json.dumps(document))
    return file


def _tests(name: str, case: Case) -> Sequence[dict[str, Any]]:
    rule = alerts()[name]
    alert = {
        "exp_labels": {**case.labels, **rule["labels"]},
        "exp_annotations": {
            key: _rendered(text, case) for key, text in rule["annotations"].items()
        },
    }
    return [
        _test(f"{name} fires", name, case.fires, case.at, [alert]),
        _test(f"{name} is quiet", name, case.quiet, case.at, []),
    ]


def _test(
    title: str, name: str, series: Mapping[str, str], at: str, expected: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "name": title,
        "interval": f"{INTERVAL_S}s",
        "input_series": [{"series": s, "values": values} for s, values in series.items()],
        "alert_rule_test": [{"eval_time": at, "alertname": name, "exp_alerts": expected}],
    }


def _rendered(text: str, case: Case) -> str:
    """The template as Prometheus would fill it in."""
    text = re.sub(r"{{ \$labels\.(\w+) }}", lambda found: case.labels.get(found[1], ""), text)
    text = re.sub(r"{{ \$value \| .*? }}", case.shown, text)
    assert "{{" not in text, text
    return text
