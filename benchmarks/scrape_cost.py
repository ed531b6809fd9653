"""What answering Prometheus costs: the controller's page of a fleet, an agent's of one node.

The fleet is one job of `--ranks` ranks, eight on a node, with `--slow` slow ones and as many open
incidents, as a state that no step changes but for its numbers. `page_ms`: the median of `--pages`
pages, each of a newer state; `first_ms`: the first one, which makes all text. `gauges_ms`: the same
series by prometheus_client's own gauges, all set and written out. `agent_ms`: the page of a node
with eight devices that tell everything. These are CPU time of this process. `scrape_ms` and
`scrape_max_ms`: median and longest of the same number of scrapes over HTTP, and of a first one,
from the request to the last byte, by the clock; client and server share this process. Prints a
table, last one line of JSON; ends with code 1 where a scrape took more than a second.
"""

import argparse
import json
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pacekeeper.agent.metrics import AgentMetrics
from pacekeeper.controller.observability.metrics import ControllerMetrics
from pacekeeper.controller.state.job_parts import DetectionState, LayoutState, StepProgress
from pacekeeper.controller.state.persistent_map import NodeMap
from pacekeeper.controller.state.rank_timings import RankTimings
from pacekeeper.controller.state.state import JobState, NodeState, RankState, State
from pacekeeper.core.incidents.findings import Finding, FindingKind, Incident, Tier
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.samples import DeviceHealth, DeviceSample
from pacekeeper.predictor.detector.state import Judgement

BAR_MS = 1000.0  # of one scrape over HTTP
DEVICES_PER_NODE = 8
JOB = "pretrain-moe"


def uuid(number: int) -> str:
    """As long as a real one."""
    return f"GPU-{number:08x}-1f2e-3d4c-5b6a-{number:012x}"


def rank(number: int, num_ranks: int) -> RankState:
    attachment = Attachment(
        job=JOB, rank=number, world_size=num_ranks, pid=1000 + number, device_uuid=uuid(number)
    )
    return RankState(attachment=attachment, node=node_of(number))


def node_of(number: int) -> str:
    return f"gpu-{number // DEVICES_PER_NODE:05d}.cluster.example"


def fleet(num_ranks: int, num_slow: int) -> State:
    """The state of one large job."""
    ranks = {number: rank(number, num_ranks) for number in range(num_ranks)}
    slowdown = (1.5,) * num_slow + (1.0,) * (num_ranks - num_slow)
    measured = RankTimings(
        judgement=Judgement(
            step=1,
            ranks=tuple(ranks),
            observed_s=tuple(0.5 * slow for slow in slowdown),
            expected_s=(0.5,) * num_ranks,
            slowdown=slowdown,
            suspicion=(0.0,) * num_ranks,
        )
    )
    incidents = tuple(
        Incident(
            incident_id=1 + number,
            job=JOB,
            finding=Finding(
                kind=FindingKind.DEVICE,
                tier=Tier.PROBABLE,
                rank=number,
                slowdown=1.5,
                onset_step=1,
                step=2,
                reason="slow",
            ),
            opened_unix_s=1e9,
        )
        for number in range(num_slow)
    )
    layout = even_layout(
        ranks=range(num_ranks), num_layers=8, num_experts=0, replicas=2, num_stages=8
    )
    job = JobState(
        name=JOB,
        ranks=ranks,
        incidents=incidents,
        layouts=LayoutState(current=layout),
        progress=StepProgress(step=1),
        detection=DetectionState(measured=measured),
    )
    nodes = {name: NodeState(name=name, agent_incarnation="x") for name in map(node_of, ranks)}
    return State(jobs={JOB: job}, nodes=NodeMap(nodes))


def next_step(state: State) -> State:
    """As after a step: every rank has new numbers."""
    job = state.jobs[JOB]
    before = job.detection.measured.judgement
    assert before is not None, "as it was made"
    observed_s = tuple(1.01 * one_s for one_s in before.observed_s)
    measured = job.detection.measured.by(
        replace(before, step=job.progress.step + 1, observed_s=observed_s)
    )
    return replace(
        state,
        jobs={
            JOB: replace(
                job,
                detection=replace(job.detection, measured=measured),
                progress=replace(job.progress, step=job.progress.step + 1),
            )
        },
    )


def cpu_ms(do: Callable[[], object]) -> float:
    began_s = time.process_time()
    do()
    return (time.process_time() - began_s) * 1e3


def scrapes_ms(state: State, num_pages: int) -> list[float]:
    """Milliseconds of a first scrape over HTTP and of others, each of a newer state."""
    metrics, found = ControllerMetrics(), []
    server = metrics.serve("127.0.0.1", 0)
    try:
        for _ in range(1 + num_pages):
            metrics.update(state)
            began_s = time.perf_counter()
            with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
                page = answer.read()
            found.append((time.perf_counter() - began_s) * 1e3)
            assert num_series(page) > len(state.nodes), "a whole page"
            state = next_step(state)
    finally:
        server.close()
    return found


def by_gauges(page: bytes) -> float:
    """The same series by gauges of prometheus_client: set them all and write them out."""
    registry, gauges = CollectorRegistry(), []
    for family in text_string_to_metric_families(page.decode()):
        if family.type == "gauge" and family.samples:
            labels = list(family.samples[0].labels)
            gauge = Gauge(family.name, family.documentation, labels, registry=registry)
            gauges.append((gauge, [(list(s.labels.values()), s.value) for s in family.samples]))

    def scrape() -> None:
        for gauge, samples in gauges:
            for values, value in samples:
                (gauge.labels(*values) if values else gauge).set(value)
        generate_latest(registry)

    scrape()
    return statistics.median(cpu_ms(scrape) for _ in range(5))


def agent_page(num_pages: int) -> tuple[float, int]:
    """(CPU milliseconds, series) of one node's page."""
    health = DeviceHealth(nvlinks=18, nvlinks_up=18, ecc_corrected=0, recovery_action=0)
    sample = DeviceSample(
        device_index=0,
        device_uuid="",
        sampled_s=0.0,
        sm_clock_mhz=1980.0,
        temperature_celsius=61.0,
        power_watts=690.0,
        energy_joules=1e7,
        utilisation_ratio=1.0,
        pcie_replays=0,
        ecc_uncorrected=0,
        answer_s=0.002,
        power_cap_held_s=1.0,
        sw_thermal_held_s=0.0,
        hw_thermal_held_s=0.0,
        power_brake_held_s=0.0,
        health=health,
    )
    metrics = AgentMetrics("gpu-00001")
    metrics.devices = tuple(
        replace(sample, device_index=n, device_uuid=uuid(n)) for n in range(DEVICES_PER_NODE)
    )
    metrics.page()
    took_ms = statistics.median(cpu_ms(metrics.page) for _ in range(num_pages))
    return took_ms, num_series(metrics.page())


def num_series(page: bytes) -> int:
    return sum(not line.startswith(b"#") for line in page.splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="not used: the fleet is made here")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 10240, 81920])
    parser.add_argument("--slow", type=int, default=64)
    parser.add_argument("--pages", type=int, default=15)
    arguments = parser.parse_args()
    cases = []
    for num_ranks in arguments.ranks:
        metrics, state = ControllerMetrics(), fleet(num_ranks, arguments.slow)
        metrics.update(state)
        first_ms = cpu_ms(metrics.page)
        pages_ms = []
        for _ in range(arguments.pages):
            state = next_step(state)
            metrics.update(state)
            pages_ms.append(cpu_ms(metrics.page))
        page = metrics.page()
        scraped_ms = scrapes_ms(fleet(num_ranks, arguments.slow), arguments.pages)
        cases.append(
            {
                "ranks": num_ranks,
                "nodes": len(state.nodes),
                "series": num_series(page),
                "page_bytes": len(page),
                "first_ms": round(first_ms, 2),
                "page_ms": round(statistics.median(pages_ms), 2),
                "page_max_ms": round(max(pages_ms), 2),
                "scrape_ms": round(statistics.median(scraped_ms), 1),
                "scrape_max_ms": round(max(scraped_ms), 1),
                "gauges_ms": round(by_gauges(page), 1),
            }
        )
    print("  ".join(f"{name:>13}" for name in cases[0]))
    for case in cases:
        print("  ".join(f"{value:>13}" for value in case.values()))
    agent_ms, agent_series = agent_page(arguments.pages)
    print(f"an agent's page: {agent_ms:.2f} ms of {agent_series} series")
    passed = all(case["scrape_max_ms"] <= BAR_MS for case in cases)
    figures = {"agent_ms": round(agent_ms, 2), "agent_series": agent_series, "passed": passed}
    print(json.dumps({"cases": cases, **figures}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
