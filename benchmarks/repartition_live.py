"""A slow rank in a live job of stages and tensor groups: what the plan brings, and is it exact?

`python -m benchmarks.repartition_live`: controller, agent and launcher as an operator starts them,
8 gloo ranks as 2 stages x 2 tensor x 2 data on emulated devices; one is made slower and nobody is
told. The fluid limit is the healthy throughput times the sum of speeds over the number of ranks
(DESIGN, section 1). Losses are compared with those of one process that holds everything. Some
minutes; what the host's cores could not do in the devices' time is told as `overrun_share`.
"""

import argparse
import json
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from pacekeeper.cli.demo_fleet import free_port
from pacekeeper.cli.demo_part import command_line
from pacekeeper.core.config import TrainConfig
from pacekeeper.core.layout_codec import decode_layout
from pacekeeper.core.ring import plan_file_name
from pacekeeper.trainer.solo import train_alone

RANKS = 8
FAULT_STEP = 25  # after the warm-up
SETTLED_STEPS = 8  # under the last layout, at the least
POLL_S = 0.2
START_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Seconds of a step, in the median."""

    step_s: float
    overrun_share: float


def job(steps: int, schedule: str, step_s: float) -> TrainConfig:
    """Small arithmetic, long device times: the devices set the pace, not the host's two cores."""
    return TrainConfig(
        job="grid",
        steps=steps,
        clock="emulated",
        dtype="float64",
        num_heads=8,
        num_stages=2,
        tensor_size=2,
        num_microbatches=4,
        rows_per_step=16,
        row_tokens=128,
        emulated_step_s=step_s,
        schedule=schedule,
    )


def as_toml(config: TrainConfig) -> str:
    """The settings that differ from the defaults."""
    plain = TrainConfig()
    lines = ["[train]"]
    for name in TrainConfig.__dataclass_fields__:
        value = getattr(config, name)
        if value != getattr(plain, name):
            lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Of a rank's log; a line that is still being written is left out."""
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def phase(lines: list[dict[str, Any]], first: int, end: int) -> Phase:
    """Steps [first, end) of a log."""
    steps = [line for line in lines if "loss" in line]
    spent = [
        (after["ended_mono_s"] - before["ended_mono_s"], after["overrun_s"] - before["overrun_s"])
        for before, after in pairwise(steps)
        if first <= after["step"] < end
    ]
    return Phase(
        step_s=median(took_s for took_s, _ in spent),
        overrun_share=sum(over_s for _, over_s in spent) / sum(took_s for took_s, _ in spent),
    )


def await_listening(port: int) -> None:
    """Raises OSError where nobody listens there in time."""
    give_up_s = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        except OSError:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(POLL_S)


def run(config: TrainConfig, victim: int, slowdown: float, folder: Path) -> list[dict[str, Any]]:
    """The whole story; rank 0's log. Raises RuntimeError where the launcher fails."""
    (folder / "faults").mkdir()
    (folder / "rings").mkdir()
    (folder / "job.toml").write_text(as_toml(config))
    log_path = folder / "run" / "steps-0.jsonl"
    with ExitStack() as stack:

        def start(name: str, *arguments: str) -> subprocess.Popen[bytes]:
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            process = subprocess.Popen(command_line(*arguments), stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return process

        port = free_port()
        address = f"127.0.0.1:{port}"
        start("controller", "controller", "--listen", address, "--store", str(folder / "store"))
        await_listening(port)  # else the next port that is free is the same
        start(
            "agent", "agent", "--controller", address, "--node", "node-0", "--metrics-listen", "",
            "--ring-dir", str(folder / "rings"),
        )  # fmt: skip
        launcher = start(
            "launch", "launch", "--config", str(folder / "job.toml"),
            "--ranks-per-node", str(RANKS), "--rendezvous", f"127.0.0.1:{free_port()}",
            "--ring-dir", str(folder / "rings"), "--run-dir", str(folder / "run"),
            "--faults", str(folder / "faults"),
        )  # fmt: skip
        is_slow = False
        while launcher.poll() is None:
            done = [line["step"] for line in lines_of(log_path) if "loss" in line]
            if not is_slow and done and done[-1] >= FAULT_STEP:
                order = json.dumps({"slowdown": slowdown, "kind": "compute"})
                (folder / "faults" / f"rank-{victim}.json").write_text(order)
                is_slow = True
            time.sleep(POLL_S)
        if launcher.returncode != 0:
            raise RuntimeError((folder / "launch.log").read_text()[-2000:])
    return lines_of(log_path)


def last_shards(folder: Path, generation: int) -> list[list[int]]:
    """Virtual shards of each rank, by stage, in the layout that a plan brought; empty: none did."""
    path = folder / "rings" / "grid" / plan_file_name(generation)
    if not path.exists():
        return []
    return [
        [run.end - run.first for group in stage.groups for run in group]
        for stage in decode_layout(path.read_bytes()).stages
    ]


def judge(
    lines: list[dict[str, Any]], config: TrainConfig, slowdown: float, shares: list[list[int]]
) -> dict[str, Any]:
    """The figures of one run."""
    steps = [line for line in lines if "loss" in line]
    plans = [line for line in lines if line.get("event") == "plan" and line["generation"] > 1]
    healthy = phase(lines, 5, FAULT_STEP)
    slow = phase(lines, FAULT_STEP + 2, plans[0]["step"] if plans else config.steps)
    last = plans[-1]["step"] if plans else config.steps
    fluid_s = healthy.step_s * RANKS / (RANKS - 1 + 1 / slowdown)
    alone = {step: loss for step, loss, _ in train_alone(replace(config, num_microbatches=1))}
    found: dict[str, Any] = {
        "schedule": config.schedule,
        "healthy_s": round(healthy.step_s, 4),
        "slow_s": round(slow.step_s, 4),
        "num_plans": len(plans),
        "moved_pause_s": round(max((line["took_s"] for line in plans), default=0.0), 4),
        "shards": shares,
        "loss_error": max(abs(line["loss"] / alone[line["step"]] - 1) for line in steps),
        "overrun_share": round(healthy.overrun_share, 3),
    }
    if config.steps - last >= SETTLED_STEPS:
        planned = phase(lines, last + 2, config.steps)
        found["planned_s"] = round(planned.step_s, 4)
        found["fluid_fraction"] = round(fluid_s / planned.step_s, 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--victim", type=int, default=3)
    parser.add_argument("--slowdown", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--step-s", type=float, default=1.5)
    parser.add_argument("--schedule", choices=("1f1b", "zero_bubble"), default="1f1b")
    arguments = parser.parse_args()
    config = job(arguments.steps, arguments.schedule, arguments.step_s)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = run(config, arguments.victim, arguments.slowdown, folder)
        made = [line["generation"] for line in lines if line.get("event") == "plan"]
        for line in lines:
            if "event" in line:
                print({k: line[k] for k in ("event", "generation", "step", "took_s") if k in line})
        shares = last_shards(folder, made[-1])
    print(json.dumps(judge(lines, config, arguments.slowdown, shares)))


if __name__ == "__main__":
    main()
