"""What the agent costs its node: memory and processor time with eight GPUs at one reading a second.

The real command runs over a driver on paper (`tests/support/fake_nvml.c`, loaded by the real
`nvidia-ml-py`), attached to a real controller, and is scraped as Prometheus would. Two cases: a
quiet node, and one whose ranks write records (`--steps-per-s`, each with micro-batches and expert
loads). Counted from `/proc`, after `--settle-s`: resident memory at its highest, and processor
time, the driver's own included (a real one takes more: `nvml_s_per_s` says what asking took here).

The bar is 80 MB and 1 % of a core for the quiet node. Needs a C compiler; prints a table, last one
line of JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.records import ExpertLoadRecord, MicroBatchRecord, StepRecord
from pacekeeper.trainer.hooks.ring_writer import Ring

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support import fake_nvml
from support.ports import free_port

BAR_BYTES, BAR_CORE_RATIO = 80_000_000, 0.01
SCRAPE_S = 15.0
COMMAND = (sys.executable, "-m", "pacekeeper.cli.main")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@contextmanager
def started(*arguments: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A command that runs until the block is left; its first line of output has been read."""
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=10)


def cpu_s(pid: int) -> float:
    """Processor time of a process, all threads, of user and kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def memory_bytes(pid: int) -> tuple[int, int]:
    """Resident now, and at its highest."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = {line.partition(":")[0]: line.split()[1] for line in lines if line.endswith("kB")}
    return int(found["VmRSS"]) * 1024, int(found["VmHWM"]) * 1024


class Job:
    """Ranks of this node that write what a trainer would."""

    def __init__(self, rings: Path, num_ranks: int) -> None:
        attachments = (
            Attachment(job="cost", rank=rank, world_size=num_ranks, pid=os.getpid())
            for rank in range(num_ranks)
        )
        self.rings = [Ring.create(rings, attachment) for attachment in attachments]

    def step(self, number: int) -> None:
        """Four micro-batches, one record of loads and the step's end, of each rank."""
        for rank, ring in enumerate(self.rings):
            for micro_batch in range(4):
                ring.write(
                    MicroBatchRecord(
                        rank=rank, step=number, micro_batch=micro_batch, generation=1,
                        compute_s=0.1, tokens=1000 + number % 97,
                    )
                )  # fmt: skip
            ring.write(
                ExpertLoadRecord(
                    rank=rank, step=number, generation=1, layer=0, first_expert=0, counts=(80,) * 16
                )
            )
            ring.write(
                StepRecord(rank=rank, step=number, generation=1, duration_s=0.5, tokens=4000)
            )


def measure(
    folder: Path, *, steps_per_s: float, settle_s: float, measure_s: float
) -> dict[str, float]:
    """One case: the agent's memory and share of a core."""
    library = fake_nvml.build(folder)
    driver = fake_nvml.Driver(folder / "state", num_devices=8)
    rings = folder / "rings"
    rings.mkdir()
    store = str(folder / "store.sqlite")
    listen = ("--listen", "127.0.0.1:0", "--api-listen", "127.0.0.1:0", "--store", store)
    with started("controller", *listen) as controller:
        assert controller.stdout is not None
        address = controller.stdout.readline().split()[2]
        port = free_port()
        options = ["--controller", address, "--ring-dir", str(rings), "--node", "n0"]
        options += ["--metrics-listen", f"127.0.0.1:{port}"]
        with started("agent", *options, env=fake_nvml.environment(library, driver)) as agent:
            job = Job(rings, num_ranks=8) if steps_per_s else None
            step = spend(settle_s, port, job, steps_per_s, 0)
            began_s, before_s = time.monotonic(), cpu_s(agent.pid)
            asked_s = series(port)["pacekeeper_agent_nvml_seconds_total"]
            spend(measure_s, port, job, steps_per_s, step)
            passed_s = time.monotonic() - began_s
            spent_s = cpu_s(agent.pid) - before_s
            seen = series(port)
            now, most = memory_bytes(agent.pid)
    assert seen["pacekeeper_agent_devices"] == 8.0, "all devices answer"
    assert seen["pacekeeper_agent_connected"] == 1.0, "the controller is attached"
    return {
        "steps_per_s": steps_per_s,
        "rss_bytes": now,
        "rss_max_bytes": most,
        "core_ratio": spent_s / passed_s,
        "nvml_s_per_s": (seen["pacekeeper_agent_nvml_seconds_total"] - asked_s) / passed_s,
    }


def spend(for_s: float, port: int, job: Job | None, steps_per_s: float, step: int) -> int:
    """Let time pass, with the job's steps and some scrapes; the number of the last step."""
    end_s = time.monotonic() + for_s
    scrape_s = time.monotonic() + SCRAPE_S
    while time.monotonic() < end_s:
        time.sleep(1.0 / steps_per_s if steps_per_s else 0.5)
        if job is not None:
            step += 1
            job.step(step)
        if time.monotonic() >= scrape_s:
            scrape_s += SCRAPE_S
            series(port)
    return step


def series(port: int) -> dict[str, float]:
    """What the agent tells Prometheus."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="not used: the driver is made here")
    parser.add_argument("--settle-s", type=float, default=20.0)
    parser.add_argument("--measure-s", type=float, default=60.0)
    parser.add_argument("--steps-per-s", type=float, default=2.0, help="of the busy node")
    arguments = parser.parse_args()
    if fake_nvml.compiler() is None:
        sys.exit("agent_footprint: needs a C compiler (gcc or cc)")
    cases = {}
    for name, steps_per_s in (("quiet", 0.0), ("busy", arguments.steps_per_s)):
        with tempfile.TemporaryDirectory() as folder:
            cases[name] = measure(
                Path(folder),
                steps_per_s=steps_per_s,
                settle_s=arguments.settle_s,
                measure_s=arguments.measure_s,
            )
    print(f"{'node':>6} {'RSS MB':>8} {'most MB':>8} {'core %':>7} {'NVML ms/s':>10}")
    for name, case in cases.items():
        print(
            f"{name:>6} {case['rss_bytes'] / 1e6:8.1f} {case['rss_max_bytes'] / 1e6:8.1f} "
            f"{case['core_ratio']:7.2%} {case['nvml_s_per_s'] * 1e3:10.2f}"
        )
    quiet = cases["quiet"]
    is_met = quiet["rss_max_bytes"] <= BAR_BYTES and quiet["core_ratio"] <= BAR_CORE_RATIO
    print(json.dumps({"cases": cases, "is_met": is_met}))


if __name__ == "__main__":
    main()
