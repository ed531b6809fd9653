"""From a rank that becomes slow to a webhook that hears of it, and where the time goes.

Real processes: agent, controller, Prometheus and Alertmanager (Debian's packages), with the rules
of `deploy/`; of the ranks only their rings, which this script writes at the pace of `--step-s`.
Every fault is on another rank, at a random moment, and is over before the next. All intervals are
scaled down (`--scrape-s`, `--evaluate-s`, `--hold-s` for the rules' `for`, `--group-wait-s`); the
usual ones (15 s, 15 s, 30 s, 30 s) give up to a minute and a half by the same sums.

Stages, by the clock of this one computer: `step` (the first slow step must end), `finding` (ring,
agent, controller: the incident is opened), `scrape` (its first sample), `rule` (the alert fires),
`alertmanager` (it has it), `webhook` (this script has it). `direct`: from the fault to the
controller's own webhook, which waits for none of these. Prints a table, last one line of JSON.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from pacekeeper.core.layout.codec import encode_layout
from pacekeeper.core.telemetry.attachment import Attachment, Clock
from pacekeeper.trainer.hooks.ring_writer import Ring

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.alerting import MISSING, Intervals, Receiver, Stack, wait_for
from support.controllers import SHAPE, ControllerProcess, applied, first_layout, step_records

BAR_S = 10.0
JOB, ALERT, SLOWDOWN = "train", "PacekeeperRankSlow", 1.6
LAYOUT = first_layout()
STAGES = ("step", "finding", "scrape", "rule", "alertmanager", "webhook")
SETTINGS = """
[policy]
mode = "observe"
[webhook]
url = "{url}"
hold_ratio = 0.0
[agent]
controller = "{controller}"
node = "node-0"
ring_dir = "{rings}"
metrics_listen = ""
"""


class Job:
    """Ranks of which only the rings are real."""

    def __init__(self, rings: Path, step_s: float) -> None:
        self._step_s, self._step = step_s, 0
        run_id = int(time.time() * 1e3)
        self._rings = {
            rank: Ring.create(
                rings,
                Attachment(
                    job=JOB,
                    rank=rank,
                    world_size=len(LAYOUT.ranks),
                    pid=os.getpid(),
                    clock=Clock.EMULATED,
                    device_uuid=f"GPU-{rank}",
                    model=SHAPE,
                    run_id=run_id,
                ),
            )
            for rank in LAYOUT.ranks
        }
        self._rings[0].write_layout(LAYOUT.generation, encode_layout(LAYOUT))
        for record in applied(LAYOUT, step=0):
            self._rings[record.rank].write(record)

    def train(self, slow: int | None = None) -> float:
        """One step, as long as its slowest rank needs; when its records were written."""
        time.sleep(self._step_s * (1.0 if slow is None else SLOWDOWN))
        factors = {} if slow is None else {slow: SLOWDOWN}
        for record in step_records(self._step, LAYOUT, factors):
            self._rings[record.rank].write(record)
        self._step += 1
        return time.time()


@contextmanager
def agent(config: Path) -> Iterator[None]:
    """The real command."""
    command = [sys.executable, "-m", "pacekeeper.cli.main", "agent", "--config", str(config)]
    with config.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def one_fault(
    job: Job, stack: Stack, people: Receiver, direct: Receiver, rank: int
) -> dict[str, float]:
    """Slow one rank down until both webhooks know it, then heal it until both know that."""
    seen = len(people.alerts(ALERT, "firing")), len(direct.alerts(ALERT, "firing"))
    over = len(people.alerts(ALERT, "resolved")), len(direct.alerts(ALERT, "resolved"))
    time.sleep(random.uniform(0.0, 1.0))
    fault_s = time.time()
    written_s = job.train(rank)

    def is_told(status: str, before: tuple[int, int], slow: int | None) -> bool:
        job.train(slow)
        now = len(people.alerts(ALERT, status)), len(direct.alerts(ALERT, status))
        return now[0] > before[0] and now[1] > before[1]

    wait_for("both are told", lambda: is_told("firing", seen, rank))
    told_s, alert = people.alerts(ALERT, "firing")[-1]
    direct_s, _ = direct.alerts(ALERT, "firing")[-1]
    labels = f'job_name="{JOB}", incident="{alert["labels"]["incident"]}"'
    assert alert["labels"]["rank"] == str(rank), alert
    (opened,) = stack.query(f"pacekeeper_incident_opened_timestamp_seconds{{{labels}}}")
    sample_s = stack.first_unix_s(f"pacekeeper_incident_opened_timestamp_seconds{{{labels}}}")
    fired_s = stack.first_unix_s(f'ALERTS{{alertstate="firing", {labels}}}')
    (taken,) = (
        found
        for found in stack.alerts_of_alertmanager()
        if found["labels"].get("incident") == alert["labels"]["incident"]
    )
    taken_s = datetime.fromisoformat(taken["updatedAt"]).timestamp()
    assert sample_s is not None and fired_s is not None
    wait_for("both are told of its end", lambda: is_told("resolved", over, None))
    moments = [fault_s, written_s, float(opened["value"][1]), sample_s, fired_s, taken_s, told_s]
    stages = {
        name: after - before
        for name, before, after in zip(STAGES, moments, moments[1:], strict=False)
    }
    return {**stages, "total": told_s - fault_s, "direct": direct_s - fault_s}


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    intervals = Intervals(
        scrape_s=arguments.scrape_s,
        evaluate_s=arguments.evaluate_s,
        hold_s=arguments.hold_s,
        group_wait_s=arguments.group_wait_s,
    )
    config, rings = folder / "pacekeeper.toml", folder / "rings"
    with Receiver() as people, Receiver() as direct:
        config.write_text(SETTINGS.format(url=direct.url, controller="127.0.0.1:1", rings=rings))
        options = ("--config", str(config), "--metrics-listen", "127.0.0.1:0")
        with ControllerProcess(folder, *options, is_fresh=True) as controller:
            found = re.search(r"metrics=(\S+)", controller.log)
            assert found is not None, controller.log
            mine = folder / "agent.toml"
            address = controller.address
            mine.write_text(SETTINGS.format(url=direct.url, controller=address, rings=rings))
            targets = {"pacekeeper": found.group(1)}
            with Stack(folder / "stack", targets, people.url, intervals) as stack, agent(mine):
                wait_for("the agent prepares its rings", rings.exists)
                job = Job(rings, arguments.step_s)
                wait_for("the watch is up", lambda: is_watched(job, stack))
                return [
                    one_fault(job, stack, people, direct, number % len(LAYOUT.ranks))
                    for number in range(arguments.runs)
                ]


def is_watched(job: Job, stack: Stack) -> bool:
    job.train()
    return bool(stack.query(f'pacekeeper_job_info{{job_name="{JOB}", watch="healthy"}}'))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="not used: the job is made here")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--step-s", type=float, default=0.25)
    parser.add_argument("--scrape-s", type=float, default=1.0)
    parser.add_argument("--evaluate-s", type=float, default=1.0)
    parser.add_argument("--hold-s", type=float, default=1.0)
    parser.add_argument("--group-wait-s", type=float, default=0.5)
    arguments = parser.parse_args()
    if MISSING:
        parser.exit(4, f"needs the Debian packages {' and '.join(MISSING)}\n")
    with tempfile.TemporaryDirectory() as folder:
        faults = measure(arguments, Path(folder))
    columns = [*STAGES, "total", "direct"]
    print("seconds   " + "  ".join(f"{name:>12}" for name in columns))
    told: dict[str, object] = {
        "runs": len(faults),
        **{name: value for name, value in vars(arguments).items() if name.endswith("_s")},
    }
    for word, fold in (("median", statistics.median), ("worst", max)):
        row = {name: round(fold(fault[name] for fault in faults), 3) for name in columns}
        print(f"{word:<10}" + "  ".join(f"{row[name]:>12.3f}" for name in columns))
        told[word] = row
    told["is_below_bar"] = max(fault["total"] for fault in faults) < BAR_S
    print(json.dumps(told))


if __name__ == "__main__":
    main()
