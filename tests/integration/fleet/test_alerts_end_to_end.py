"""From a rank that becomes slow to a webhook that hears of it: over the real Prometheus and
Alertmanager, and by the controller itself. Intervals are scaled down (`Intervals`)."""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from pacekeeper.agent.metrics import AgentMetrics
from pacekeeper.cli.admin.ca import Kind
from pacekeeper.core.config.metrics import MetricsConfig
from pacekeeper.core.telemetry.node_report import JobReport
from pacekeeper.core.telemetry.samples import DeviceSample
from support.alerting import MISSING, Intervals, Receiver, Stack, wait_for
from support.authorities import Authority
from support.controllers import (
    ControllerProcess,
    ScriptedAgent,
    attached,
    first_layout,
    step_records,
)
from support.dashboards import expressions

pytestmark = pytest.mark.skipif(
    bool(MISSING),
    reason=f"needs the Debian packages {' and '.join(MISSING)}",
)
JOB, SLOW, STEP_S = "train", 1, 0.05
LAYOUT = first_layout()
DEVICES = tuple(
    DeviceSample(
        device_index=rank,
        device_uuid=f"GPU-{rank}",
        sampled_s=0.0,
        sm_clock_mhz=1155.0 if rank == SLOW else 1980.0,
        temperature_celsius=60.0,
        power_watts=600.0,
    )
    for rank in LAYOUT.ranks
)
SETTINGS = """
[policy]
mode = "observe"
[webhook]
url = "{url}"
hold_ratio = 0.0
[metrics]
cert = "{cert}"
key = "{key}"
token_file = "{token}"
"""


@dataclass(kw_only=True)
class Job:
    """Steps of one job, told by one agent for as long as somebody asks for more."""

    agent: ScriptedAgent
    step: int = 0

    def begin(self) -> None:
        report = attached(JOB, LAYOUT)
        told = tuple(replace(a, device_uuid=f"GPU-{a.rank}") for a in report.attached)
        self.agent.report_and_wait(replace(report, attached=told))

    def train(self, slow: dict[int, float] | None = None) -> None:
        """One step more."""
        self.agent.report(JobReport(job=JOB, records=step_records(self.step, LAYOUT, slow)))
        time.sleep(STEP_S)
        self.step += 1


@dataclass(kw_only=True)
class World:
    """A controller that is scraped over TLS, by who shows a token, and two webhooks."""

    controller: ControllerProcess
    job: Job
    stack: Stack
    people: Receiver
    direct: Receiver


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("alerts")
    authority = Authority(folder / "pki")
    cert = authority.cert(Kind.METRICS, "main", hosts=("127.0.0.1",))
    token = folder / "token"
    token.write_text("a-token\n")
    token.chmod(0o600)
    with Receiver() as people, Receiver() as direct:
        config = folder / "pacekeeper.toml"
        key = cert.with_suffix(".key")
        config.write_text(SETTINGS.format(url=direct.url, cert=cert, key=key, token=token))
        arguments = ("--config", str(config), "--metrics-listen", "127.0.0.1:0")
        with ControllerProcess(folder, *arguments) as controller:
            found = re.search(r"metrics=(\S+)", controller.log)
            assert found is not None, controller.log
            scrape = {
                "scheme": "https",
                "authorization": {"credentials_file": str(token)},
                "tls_config": {"ca_file": str(authority.ca)},
            }
            files = MetricsConfig(cert=str(cert), key=str(key), token_file=str(token))
            devices = AgentMetrics("node-0")
            devices.devices = DEVICES
            agents = devices.serve("127.0.0.1:0", files)
            targets = {"pacekeeper": found.group(1), "agents": f"127.0.0.1:{agents.server_port}"}
            with Stack(folder / "stack", targets, people.url, Intervals(), scrape) as stack:
                job = Job(agent=ScriptedAgent(controller.address))
                yield World(
                    controller=controller, job=job, stack=stack, people=people, direct=direct
                )
                job.agent.close()
            agents.close()


def told(world: World, receiver: Receiver, status: str, slow: dict[int, float]) -> dict[str, Any]:
    """Train until this receiver was told of the slow rank, or of its end."""

    def heard() -> list[tuple[float, dict[str, Any]]]:
        world.job.train(slow)
        return receiver.alerts("PacekeeperRankSlow", status)

    (_, alert) = wait_for(f"an alert is {status}", heard)[0]
    found: dict[str, Any] = alert
    return found


def test_a_slow_rank_is_told_to_people_with_its_place_and_then_its_end(world: World) -> None:
    world.job.begin()
    for _ in range(24):
        world.job.train()
    place = {
        "alertname": "PacekeeperRankSlow",
        "severity": "warning",
        "job_name": JOB,
        "incident": "1",
        "kind": "device",
        "rank": str(SLOW),
        "node": "node-0",
        "UUID": f"GPU-{SLOW}",
    }
    firing = told(world, world.people, "firing", {SLOW: 1.6})
    assert place.items() <= firing["labels"].items()
    summary = firing["annotations"]["summary"]
    assert re.search(r"\b1\.[56]\d times\b", summary) and "{{" not in summary
    assert firing["annotations"]["runbook_url"].endswith("PacekeeperRankSlow.md")
    by_itself = told(world, world.direct, "firing", {SLOW: 1.6})
    assert by_itself["labels"] == place
    assert "rank 1" in by_itself["annotations"]["description"]
    for receiver in (world.people, world.direct):
        over = told(world, receiver, "resolved", {})
        assert over["labels"]["rank"] == str(SLOW)
        assert over["fingerprint"] in {firing["fingerprint"], by_itself["fingerprint"]}
    assert "webhook=lost" not in world.controller.log


def test_prometheus_has_ranks_with_their_devices_and_records_by_our_rules(world: World) -> None:
    (info,) = world.stack.query(f'pacekeeper_rank_info{{rank="{SLOW}"}}')
    assert info["metric"] | {"job_name": JOB, "node": "node-0", "UUID": "GPU-1"} == info["metric"]
    assert info["metric"]["job"] == "pacekeeper", "Prometheus' own label is left alone"
    recorded = "job_name:pacekeeper_job_tokens_per_second:quantile50_6h"
    assert wait_for("a rule records", lambda: world.stack.query(recorded))


def test_the_dashboard_shows_something_in_every_panel(world: World) -> None:
    def is_shown(expression: str) -> bool:
        world.job.train({SLOW: 1.6})
        return bool(world.stack.query(expression))

    for title, expression in expressions().items():
        wait_for(f"a series in {title}: {expression}", partial(is_shown, expression))
    slow = "rank:pacekeeper_device_sm_clock_hertz:slow"
    wait_for("the clocks of slow ranks are recorded", lambda: is_shown(slow))
    (clock,) = world.stack.query(slow)
    assert clock["metric"]["rank"] == str(SLOW) and clock["value"][1] == "1155000000"
