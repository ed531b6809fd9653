"""Generates the Grafana dashboard: `python deploy/grafana/generate.py [--check]`.

`--check` writes nothing and exits with 1 if the file differs.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("pacekeeper.json")
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SCHEMA = 36  # of Grafana 9 and later
WIDTH = 24  # of the grid
_SIZES = {"stat": (6, 4), "table": (12, 8), "timeseries": (8, 8)}  # width, height
JOB = 'job_name=~"$job"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel: title, PromQL expression, and its kind ("stat", "table" or "timeseries")."""

    title: str
    expr: str
    legend: str = ""
    unit: str = "short"
    kind: str = "timeseries"
    text: str = ""


def joined(series: str) -> str:
    """PromQL for a device series of the slow ranks, with job and rank labels."""
    slow = f"(pacekeeper_rank_info{{{JOB}}} and on (job_name, rank) pacekeeper_rank_slowdown_ratio)"
    return f"{slow} * on (UUID) group_left () max by (UUID) ({series})"


RANK = "{{job_name}} rank {{rank}}"
ROWS: dict[str, tuple[Panel, ...]] = {
    "Fleet": (
        Panel(title="Known jobs", expr="sum(pacekeeper_jobs)", kind="stat"),
        Panel(title="Agents attached", expr="sum(pacekeeper_nodes_connected)", kind="stat"),
        Panel(
            title="Disconnected agents",
            expr="sum(pacekeeper_node_disconnected) or vector(0)",
            kind="stat",
            text="Nodes with running ranks whose agent is disconnected.",
        ),
        Panel(
            title="Open incidents",
            expr='sum(pacekeeper_incidents_open{kind!~".+_imbalance"})',
            kind="stat",
        ),
        Panel(
            title="Incidents",
            expr='pacekeeper_incident_slowdown_ratio{kind!~".+_imbalance"}',
            kind="table",
            text="Open incidents, slowest first. `pacekeeper incidents` has causes and actions.",
        ),
        Panel(
            title="Alerts",
            expr='ALERTS{alertname=~"Pacekeeper.*", alertstate="firing"} or vector(0)',
            kind="table",
        ),
    ),
    "Jobs": (
        Panel(
            title="Tokens per second",
            expr=f"pacekeeper_job_tokens_per_second{{{JOB}}}",
            legend="{{job_name}}",
        ),
        Panel(
            title="Steps per second",
            expr=f"rate(pacekeeper_job_step{{{JOB}}}[$__rate_interval])",
            legend="{{job_name}}",
        ),
        Panel(
            title="Detection state",
            expr=f"pacekeeper_job_info{{{JOB}}}",
            legend="{{job_name}} {{watch}}",
            text="Blind and measuring are not healthy.",
        ),
        Panel(
            title="Detectable slowdown",
            expr=f"pacekeeper_job_detectable_slowdown_ratio{{{JOB}}}",
            legend="{{job_name}}",
        ),
        Panel(title="Layout", expr=f"pacekeeper_job_generation{{{JOB}}}", legend="{{job_name}}"),
        Panel(
            title="Ranks",
            expr=f"pacekeeper_job_ranks{{{JOB}}}",
            legend="{{job_name}} {{state}}",
        ),
    ),
    "Slow ranks": (
        Panel(
            title="Slowdown",
            expr=f"pacekeeper_rank_slowdown_ratio{{{JOB}}}",
            legend=RANK,
            text="Observed / expected, for the slowest eight of each job while they are slow.",
        ),
        Panel(
            title="SM clock of their devices",
            expr=joined("pacekeeper_device_sm_clock_hertz"),
            legend=RANK,
            unit="hertz",
        ),
        Panel(
            title="Temperature of their devices",
            expr=joined("pacekeeper_device_temperature_celsius"),
            legend=RANK,
            unit="celsius",
        ),
        Panel(
            title="Power of their devices",
            expr=joined("pacekeeper_device_power_watts"),
            legend=RANK,
            unit="watt",
        ),
    ),
    "Plans": (
        Panel(
            title="Plans made",
            expr="sum by (level) (increase(pacekeeper_plans_total[$__rate_interval]))",
            legend="{{level}}",
        ),
        Panel(
            title="Plans rejected or rolled back",
            expr="increase(pacekeeper_plans_refused_total[$__rate_interval])",
            legend="refused",
        ),
        Panel(
            title="Plans waiting for approval",
            expr=f"pacekeeper_job_proposals_waiting{{{JOB}}}",
            legend="{{job_name}}",
        ),
    ),
    "pacekeeper itself": (
        Panel(
            title="Event loop utilisation",
            expr="rate(pacekeeper_advance_seconds_sum[$__rate_interval])",
            legend="{{instance}}",
            unit="percentunit",
        ),
        Panel(
            title="Longest block of the event loop",
            expr="pacekeeper_loop_lag_seconds",
            legend="{{instance}}",
            unit="s",
        ),
        Panel(
            title="Days until a certificate expires",
            expr="min by (use) (pacekeeper_certificate_expiry_timestamp_seconds - time()) / 86400",
            legend="{{use}}",
        ),
        Panel(
            title="Reports per second",
            expr="rate(pacekeeper_reports_total[$__rate_interval])",
            legend="{{instance}}",
        ),
        Panel(
            title="Reports rejected, events dropped",
            expr="increase(pacekeeper_reports_rejected_total[$__rate_interval])"
            " + increase(pacekeeper_advance_failures_total[$__rate_interval])",
            legend="{{instance}}",
        ),
        Panel(
            title="Records lost by agents",
            expr="increase(pacekeeper_agent_records_lost_total[$__rate_interval]) > 0 or vector(0)",
            legend="{{instance}}",
        ),
    ),
}


def expressions() -> Iterator[str]:
    """PromQL expressions of all panels."""
    for panels in ROWS.values():
        for panel in panels:
            yield panel.expr


def shown(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    """The panel in Grafana's JSON model, at a place of the grid."""
    width, height = _SIZES[panel.kind]
    is_table = panel.kind == "table"
    target = {
        "datasource": SOURCE,
        "expr": panel.expr,
        "format": "table" if is_table else "time_series",
        "instant": is_table,
        "legendFormat": panel.legend,
        "range": not is_table,
        "refId": "A",
    }
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "gridPos": {"x": x, "y": y, "w": width, "h": height},
        "targets": [target],
    }


def laid_out() -> Iterator[dict[str, Any]]:
    """All rows and panels, from left to right and top to bottom."""
    number, y = 0, 0
    for title, panels in ROWS.items():
        number += 1
        place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        yield {"id": number, "type": "row", "title": title, "gridPos": place, "panels": []}
        x, y, height = 0, y + 1, 0
        for panel in panels:
            number += 1
            if x + _SIZES[panel.kind][0] > WIDTH:
                x, y, height = 0, y + height, 0
            made = shown(panel, number, x, y)
            x += made["gridPos"]["w"]
            height = max(height, made["gridPos"]["h"])
            yield made
        y += height


def document() -> str:
    """The whole file."""
    source = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    job = {
        "name": "job",
        "label": "job",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": "label_values(pacekeeper_job_info, job_name)", "refId": "jobs"},
        "refresh": 2,  # whenever the time range changes
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
    dashboard = {
        "uid": "pacekeeper",
        "title": "pacekeeper",
        "tags": ["pacekeeper", "training"],
        "schemaVersion": SCHEMA,
        "editable": False,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source, job]},
        "panels": list(laid_out()),
    }
    return json.dumps(dashboard, indent=2, sort_keys=True) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        FILE.write_text(document())
    elif FILE.read_text() != document():
        print(f"{FILE.name} is not what {Path(__file__).name} writes: run it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
