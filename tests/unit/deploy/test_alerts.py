"""Alerts ask for what is really told, fire when they should and only then, and have a page each."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pacekeeper.controller.observability.alerts import RULES
from pacekeeper.controller.state.job_parts import SaveTrouble
from pacekeeper.controller.state.state import RankStatus
from pacekeeper.core.incidents.findings import Blindness, CoverageState, FindingKind
from support.alert_rules import FILE, Case, alerts, groups, judged
from support.series import labels_of_series
from support.tree import ROOT

SELECTOR = re.compile(r"\b(pacekeeper_\w+)(?:\{(.*?)\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"(.*?)"')
VALUES: dict[str, set[str]] = {
    "cause": {*map(str, Blindness), *map(str, SaveTrouble)},
    "kind": set(map(str, FindingKind)),
    "state": set(map(str, RankStatus)),
    "watch": set(map(str, CoverageState)),
}
TARGET = {"instance"}  # labels that Prometheus gives by itself
needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="needs promtool (Debian: prometheus)"
)


@pytest.mark.parametrize("rule", [r for g in groups() for r in g["rules"]], ids=str)
def test_a_rule_asks_for_what_there_is(rule: dict[str, str]) -> None:
    told = labels_of_series()
    selectors = SELECTOR.findall(rule["expr"])
    assert selectors
    for series, matchers in selectors:
        assert series in told, f"no such series: {series}"
        for label, how, values in MATCHER.findall(matchers):
            assert label in told[series]
            assert how in ("=", "!=", "=~")
            known = VALUES.get(label, set())
            if how == "=~":
                assert all(any(re.fullmatch(v, k) for k in known) for v in values.split("|"))
            else:
                assert values in known | {""}


@pytest.mark.parametrize(("name", "rule"), alerts().items())
def test_an_alert_shows_labels_that_it_has_and_leads_to_its_page(
    name: str, rule: dict[str, dict[str, str]]
) -> None:
    told = labels_of_series()
    known = {label for s, _ in SELECTOR.findall(str(rule["expr"])) for label in told[s]} | TARGET
    assert set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))) <= known
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    page = ROOT / rule["annotations"]["runbook_url"]
    assert page.stem == name
    held = f"after {rule['for']}" if "for" in rule else "at once"
    assert page.read_text().startswith(f"# {name}\n\n*{rule['labels']['severity']}, {held}*\n")


def test_every_page_has_its_alert_and_names_only_such() -> None:
    pages = {path.stem: path.read_text() for path in (ROOT / "docs" / "runbooks").glob("*.md")}
    assert set(pages) == set(alerts())
    assert {n for text in pages.values() for n in re.findall(r"Pacekeeper\w+", text)} <= set(pages)


def test_the_controllers_own_webhook_says_the_same_as_the_rules() -> None:
    for name, (severity, hold_s) in RULES.items():
        rule = alerts()[name]
        held = rule.get("for", "0s")
        assert hold_s == float(held[:-1]) * {"s": 1, "m": 60}[held[-1]], name
        assert severity == rule["labels"]["severity"]


def test_whatever_makes_a_job_blind_is_an_alert() -> None:
    asked = " ".join(rule["expr"] for rule in alerts().values())
    assert 'pacekeeper_job_blind{cause="canary"}' in asked
    assert 'pacekeeper_job_blind{cause!="canary"}' in asked
    assert "pacekeeper_canary_found == 0" in asked


def once(name: str, **labels: str) -> str:
    """One series by its name and labels."""
    pairs = ", ".join(f'{label}="{value}"' for label, value in labels.items())
    return f"pacekeeper_{name}{{{pairs}}}"


ON, OFF = "1x99", "0x99"  # all the time
NODE = once("agent_info", instance="a:1", node="n7")
GPU = {"instance": "a:1", "UUID": "GPU-1", "device_index": "3"}
FOUND = {"incident": "5", "rank": "3", "node": "n7", "UUID": "GPU-1"}


def incident(name: str, **labels: str) -> str:
    return once(name, job_name="j", **{"kind": "device", **FOUND, **labels})


def counter(name: str, **labels: str) -> Case:
    """Of a count that should not go up: it does once, or it stands since long ago."""
    series = once(name, **labels)
    return Case(fires={series: "0x30 1x99"}, quiet={series: "0x5 3x99"}, labels=labels)


CASES = {
    "PacekeeperAbsent": Case(fires={once("reports_total"): ON}, quiet={once("jobs"): "0x99"}),
    "PacekeeperNoLeader": Case(
        fires={once("leader", instance="c:1"): OFF, once("leader", instance="c:2"): OFF},
        quiet={once("leader", instance="c:1"): OFF, once("leader", instance="c:2"): ON},
    ),
    "PacekeeperTwoLeaders": Case(
        fires={once("leader", instance="c:1"): ON, once("leader", instance="c:2"): ON},
        quiet={  # a takeover; and another fleet
            once("leader", instance="c:1"): "1x30 0x99",
            once("leader", instance="c:2"): "0x30 1x99",
            once("leader", instance="d:1", job="other"): ON,
        },
    ),
    "PacekeeperLeaderChanges": Case(
        fires={once("leader_transitions_total", instance="c:1"): "0x20 0+1x99"},
        quiet={once("leader_transitions_total", instance="c:1"): "0x20 2x99"},
        labels={"instance": "c:1"},
    ),
    "PacekeeperStandbyStale": Case(
        fires={once("reads_age_seconds", instance="c:1"): "99x99"},
        quiet={once("reads_age_seconds", instance="c:1"): "3x99"},
        labels={"instance": "c:1"},
        shown="1m 39s",
    ),
    "PacekeeperCanaryMissed": Case(
        fires={once("canary_found", job_name="j"): OFF},
        quiet={once("canary_found", job_name="j"): ON},
        labels={"job_name": "j"},
    ),
    "PacekeeperCanaryOverdue": Case(
        fires={
            once("job_blind", job_name="j", cause="canary"): ON,
            once("canary_found", job_name="other"): OFF,
        },
        quiet={
            once("job_blind", job_name="j", cause="canary"): ON,
            once("canary_found", job_name="j"): OFF,
        },
        labels={"job_name": "j", "cause": "canary"},
    ),
    "PacekeeperBlind": Case(
        fires={once("job_blind", job_name="j", cause="noise"): ON},
        quiet={
            once("job_blind", job_name="j", cause="canary"): ON,
            once("job_blind", job_name="k", cause="no_records"): "1x8 stale _x26 1x99",
        },
        labels={"job_name": "j", "cause": "noise"},
    ),
    "PacekeeperAgentDisconnected": Case(
        fires={once("node_disconnected", node="n7"): ON},
        quiet={once("node_disconnected", node="n7"): "1x30 stale"},
        labels={"node": "n7"},
    ),
    "PacekeeperAgentUnattached": Case(
        fires={once("agent_connected", instance="a:1"): OFF, NODE: ON},
        quiet={once("agent_connected", instance="a:1"): ON, NODE: ON},
        labels={"instance": "a:1", "node": "n7"},
    ),
    "PacekeeperRecordsLost": Case(
        fires={
            once("agent_records_lost_total", instance="a:1"): OFF,
            once("agent_batches_dropped_total", instance="a:1"): "0x30 2x99",
        },
        quiet={
            once("agent_records_lost_total", instance="a:1"): "9x99",
            once("agent_batches_dropped_total", instance="a:1"): "0x3 2x99",
        },
        labels={"instance": "a:1"},
    ),
    "PacekeeperRankSlow": Case(
        fires={incident("incident_slowdown_ratio"): "1.6x99"},
        quiet={
            incident("incident_slowdown_ratio", kind="expert_imbalance"): "1.6x99",
            incident("incident_slowdown_ratio", rank="", node="", UUID=""): "1.6x99",
        },
        labels={"job_name": "j", "kind": "device", **FOUND},
        shown="1.60",
    ),
    "PacekeeperJobSlow": Case(
        fires={once("incident_slowdown_ratio", job_name="j", incident="5", kind="host"): "1.5x99"},
        quiet={incident("incident_slowdown_ratio", kind="host"): "1.5x99"},
        labels={"job_name": "j", "incident": "5", "kind": "host"},
        shown="1.50",
    ),
    "PacekeeperRankDied": Case(
        fires={once("incidents_total", kind="death"): "0x30 2x99"},
        quiet={
            once("incidents_total", kind="death"): "0x5 2x99",
            once("incidents_total", kind="device"): "0x30 2x99",
        },
        labels={"kind": "death"},
    ),
    "PacekeeperRecoveryStalled": Case(
        fires={incident("incident_opened_timestamp_seconds", kind="death"): "9x99"},
        quiet={
            incident("incident_opened_timestamp_seconds", kind="death"): "9x5 stale",
            incident("incident_opened_timestamp_seconds", incident="6"): "9x99",
            once("incident_opened_timestamp_seconds", job_name="over", kind="death"): "9x99",
            once("job_info", job_name="over", watch="ended"): ON,
        },
        labels={"job_name": "j", "kind": "death", **FOUND},
    ),
    "PacekeeperHang": Case(
        fires={incident("incident_opened_timestamp_seconds", kind="hang"): "9x99"},
        quiet={
            incident("incident_opened_timestamp_seconds", kind="hang"): "9x0 stale",
            incident("incident_opened_timestamp_seconds", incident="6", kind="death"): "9x99",
        },
        labels={"job_name": "j", "kind": "hang", **FOUND},
    ),
    "PacekeeperJobDied": Case(
        fires={
            once("job_info", job_name="j", watch="ended"): ON,
            once("job_ranks", job_name="j", state="dead"): "4x99",
        },
        quiet={
            once("job_info", job_name="j", watch="ended"): ON,
            once("job_ranks", job_name="j", state="dead"): ON,
            once("job_ranks", job_name="j", state="finished"): "3x99",
            once("job_info", job_name="k", watch="blind"): ON,
        },
        labels={"job_name": "j", "watch": "ended"},
    ),
    "PacekeeperPlanStuck": Case(
        fires={once("job_plan_offered_timestamp_seconds", job_name="j"): "600x99"},
        quiet={once("job_plan_offered_timestamp_seconds", job_name="j"): "1000x99"},
        labels={"job_name": "j"},
    ),
    "PacekeeperPlansRefused": Case(
        fires={once("plans_refused_total"): "0x10 1x5 3x99"},
        quiet={once("plans_refused_total"): "3x10 4x99"},
    ),
    "PacekeeperProposalWaits": Case(
        fires={once("job_proposals_waiting", job_name="j"): ON},
        quiet={once("job_proposals_waiting", job_name="j"): OFF},
        labels={"job_name": "j"},
    ),
    "PacekeeperCheckpointsMissed": Case(
        fires={once("job_checkpoint_trouble", job_name="j", cause="late"): ON},
        quiet={once("job_checkpoint_trouble", job_name="j", cause="late"): "1x15 stale"},
        labels={"job_name": "j", "cause": "late"},
    ),
    "PacekeeperSnapshotsMissed": Case(
        fires={once("job_snapshot_trouble", job_name="j", cause="late"): ON},
        quiet={once("job_snapshot_trouble", job_name="j", cause="late"): "1x15 stale"},
        labels={"job_name": "j", "cause": "late"},
    ),
    "PacekeeperThroughputFell": Case(
        fires={once("job_tokens_per_second", job_name="j"): "100x120 60x60"},
        quiet={
            once("job_tokens_per_second", job_name="j"): "100x120 80x60",
            once("job_tokens_per_second", job_name="k"): "100x160 60x20",  # for five minutes only
        },
        labels={"job_name": "j"},
        at="85m",
    ),
    "PacekeeperWorkUneven": Case(
        fires={once("incidents_open", kind="expert_imbalance"): ON},
        quiet={once("incidents_open", kind="device"): ON},
        labels={"kind": "expert_imbalance"},
        at="40m",
    ),
    "PacekeeperDeviceLost": Case(
        fires={once("device_lost", **GPU): ON, NODE: ON},
        quiet={once("device_lost", **GPU): OFF, NODE: ON},
        labels={**GPU, "node": "n7"},
    ),
    "PacekeeperDeviceNeedsReset": Case(
        fires={
            once("device_recovery_action", **GPU): OFF,
            once("device_remap_pending", **GPU): ON,
            NODE: ON,
        },
        quiet={
            once("device_recovery_action", **GPU): OFF,
            once("device_remap_pending", **GPU): OFF,
            NODE: ON,
        },
        labels={**GPU, "node": "n7"},
    ),
    "PacekeeperDriverHangs": Case(
        fires={once("agent_nvml_waiting_seconds", instance="a:1"): "0+30x99", NODE: ON},
        quiet={once("agent_nvml_waiting_seconds", instance="a:1"): "9x99", NODE: ON},
        labels={"instance": "a:1", "node": "n7"},
    ),
    "PacekeeperClockUnsynchronised": Case(
        fires={once("agent_clock_synchronised", instance="a:1"): OFF, NODE: ON},
        quiet={once("agent_clock_synchronised", instance="a:1"): "1x40 0x99", NODE: ON},
        labels={"instance": "a:1", "node": "n7"},
        at="40m",
    ),
    "PacekeeperStoreRefuses": Case(
        fires={once("store_refusing", reason="full"): ON},
        quiet={once("store_refusing", reason="full"): "1x30 stale"},
        labels={"reason": "full"},
    ),
    "PacekeeperEventsDropped": counter("advance_failures_total"),
    "PacekeeperReportsRejected": counter("reports_rejected_total"),
    "PacekeeperReportsMissed": counter("reports_missed_total"),
    "PacekeeperCallersRefused": Case(
        fires={once("refusals_total"): "0+2x99"}, quiet={once("refusals_total"): "0+0.5x99"}
    ),
    "PacekeeperAuditFails": counter("audit_failures_total"),
    "PacekeeperWebhookFails": counter("webhook_lost_total"),
    "PacekeeperControllerStalls": Case(
        fires={once("loop_lag_seconds"): "0x9 2.5x99"},
        quiet={once("loop_lag_seconds"): "0x9 1.9x60 2.5x4 0.1x99"},
        shown="2.5s",
    ),
    # Series of these cases begin at 1970: now is minutes after that.
    "PacekeeperCertificateEnds": Case(
        fires={once("certificate_expiry_timestamp_seconds", use="tls"): f"{2 * 86400}x99"},
        quiet={once("certificate_expiry_timestamp_seconds", use="tls"): f"{3 * 86400}x99"},
        labels={"use": "tls"},
    ),
    "PacekeeperControllerBusy": Case(
        fires={once("advance_seconds_sum"): "0+28x99"},
        quiet={once("advance_seconds_sum"): "0+20x99"},
    ),
}


@needs_promtool
def test_promtool_takes_the_file_as_it_stands() -> None:
    done = subprocess.run(["promtool", "check", "rules", FILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_each_alert_fires_on_its_fault_and_not_on_what_is_near_it(tmp_path: Path) -> None:
    assert set(CASES) == set(alerts())
    assert judged(CASES, tmp_path) == ""


@needs_promtool
@pytest.mark.parametrize("part", ["fires", "quiet"])
def test_promtool_would_see_a_case_that_is_wrong(part: str, tmp_path: Path) -> None:
    case = CASES["PacekeeperStoreRefuses"]
    other = case.quiet if part == "fires" else case.fires
    series = {"fires": case.fires, "quiet": case.quiet, part: other}
    wrong = Case(fires=series["fires"], quiet=series["quiet"], labels=case.labels)
    assert "PacekeeperStoreRefuses" in judged({"PacekeeperStoreRefuses": wrong}, tmp_path)
