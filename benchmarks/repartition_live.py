"""A slow rank in a live job of stages and tensor groups: what the plan brings, and is it exact?

`python -m benchmarks.repartition_live`: controller, agent and launcher as an operator starts them,
8 gloo ranks as 2 stages x 2 tensor x 2 data on emulated devices; one is made slower and nobody is
told. The fluid limit is the healthy throughput times the sum of speeds over the number of ranks
(DESIGN, section 1). Losses are compared with those of one process that holds everything. With
`--heals-at` the fault ends again, and all should go home; with `--slowdown 12 --may-leave-out` the
rank stands by meanwhile. Some minutes; what the host's cores could not do in the devices' time is
told as `overrun_share`.
"""

import argparse
import json
import shutil
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

from pacekeeper.cli.demo.fleet import free_port
from pacekeeper.cli.demo.process import command_line
from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.layout.codec import decode_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.shm_ring import plan_file_name
from pacekeeper.trainer.toy.engine.single_process import train_alone

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Rank `victim` is that much slower from FAULT_STEP on, until the end or step `heals_at`."""

    victim: int
    slowdown: float
    heals_at: int | None

    def order(self, step: int) -> dict[str, Any]:
        """What its device is told once `step` is over."""
        is_over = self.heals_at is not None and step >= self.heals_at
        return {"slowdown": 1.0 if is_over else self.slowdown, "kind": "compute"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Rank 0's log, and the incidents as `pacekeeper incidents` tells them."""

    lines: list[dict[str, Any]]
    incidents: list[dict[str, Any]]


def run(config: TrainConfig, fault: Fault, folder: Path, *, may_leave_out: bool) -> Story:
    """The whole story. Raises RuntimeError where the launcher fails."""
    (folder / "faults").mkdir()
    (folder / "rings").mkdir()
    (folder / "job.toml").write_text(as_toml(config))
    policy = f"[policy]\nmay_leave_out = {str(may_leave_out).lower()}\n"
    (folder / "controller.toml").write_text(policy)
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
        start(
            "controller", "controller", "--listen", address, "--store", str(folder / "store"),
            "--config", str(folder / "controller.toml"),
        )  # fmt: skip
        await_listening(port)  # else the next port that is free is the same
        start(
            "agent", "agent", "--controller", address, "--node", "node-0", "--metrics-listen", "",
            "--ring-dir", str(folder / "rings"), "--record", str(folder / "record"),
        )  # fmt: skip
        launcher = start(
            "launch", "launch", "--config", str(folder / "job.toml"),
            "--ranks-per-node", str(RANKS), "--rendezvous", f"127.0.0.1:{free_port()}",
            "--ring-dir", str(folder / "rings"), "--run-dir", str(folder / "run"),
            "--faults", str(folder / "faults"),
        )  # fmt: skip
        ordered: dict[str, Any] = {}
        while launcher.poll() is None:
            done = [line["step"] for line in lines_of(log_path) if "loss" in line]
            if done and done[-1] >= FAULT_STEP and ordered != fault.order(done[-1]):
                ordered = fault.order(done[-1])
                (folder / "faults" / f"rank-{fault.victim}.json").write_text(json.dumps(ordered))
            time.sleep(POLL_S)
        if launcher.returncode != 0:
            raise RuntimeError((folder / "launch.log").read_text()[-2000:])
        asked = command_line("incidents", "--controller", address, "--json")
        told = subprocess.run(asked, check=True, capture_output=True).stdout
    return Story(lines=lines_of(log_path), incidents=json.loads(told))


def layout_of(folder: Path, generation: int) -> Layout | None:
    """The one that a plan brought; None for the first."""
    path = folder / "rings" / "grid" / plan_file_name(generation)
    return decode_layout(path.read_bytes()) if path.exists() else None


def shards_of(layout: Layout | None) -> list[list[int]]:
    """Attention shards of each rank, by stage."""
    if layout is None:
        return []
    by_stage = zip(*layout.mesh, strict=True)
    return [[r.end - r.first for stage in of for r in stage.attention] for of in by_stage]


def judge(story: Story, config: TrainConfig, fault: Fault, folder: Path) -> dict[str, Any]:
    """The figures of one run."""
    lines = story.lines
    steps = [line for line in lines if "loss" in line]
    end = config.steps if fault.heals_at is None else fault.heals_at
    every = [line for line in lines if line.get("event") == "plan" and line["generation"] > 1]
    plans = [line for line in every if line["step"] < end]
    away = layout_of(folder, plans[-1]["generation"]) if plans else None
    healthy = phase(lines, 5, FAULT_STEP)
    slow = phase(lines, FAULT_STEP + 2, plans[0]["step"] if plans else end)
    last = plans[-1]["step"] if plans else end
    fluid_s = healthy.step_s * RANKS / (RANKS - 1 + 1 / fault.slowdown)
    accused = [(one["kind"], one.get("rank")) for one in story.incidents]
    alone = {step: loss for step, loss, _ in train_alone(replace(config, num_microbatches=1))}
    found: dict[str, Any] = {
        "schedule": config.schedule,
        "healthy_s": round(healthy.step_s, 4),
        "slow_s": round(slow.step_s, 4),
        "num_plans": len(every),
        "moved_pause_s": round(max((line["took_s"] for line in every), default=0.0), 4),
        "shards": shards_of(away),
        "standing_by": [] if away is None else list(away.standing_by),
        "found": accused.count(("device", fault.victim)),
        "accused_wrongly": [who for who in accused if who != ("device", fault.victim)],
        "loss_error": max(abs(line["loss"] / alone[line["step"]] - 1) for line in steps),
        "overrun_share": round(healthy.overrun_share, 3),
    }
    if end - last >= SETTLED_STEPS:
        planned = phase(lines, last + 2, end)
        found["planned_s"] = round(planned.step_s, 4)
        found["fluid_fraction"] = round(fluid_s / planned.step_s, 4)
    if fault.heals_at is not None:
        found["healed_s"] = round(
            phase(lines, config.steps - SETTLED_STEPS, config.steps).step_s, 4
        )
        found["home_shards"] = shards_of(layout_of(folder, every[-1]["generation"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="not used: all data is made here")
    parser.add_argument("--victim", type=int, default=3)
    parser.add_argument("--slowdown", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--step-s", type=float, default=1.5)
    parser.add_argument("--schedule", choices=("1f1b", "zero_bubble"), default="1f1b")
    parser.add_argument("--heals-at", type=int, help="the step at which the fault ends")
    parser.add_argument("--may-leave-out", action="store_true", help="a rank may stand by")
    parser.add_argument("--record", type=Path, help="where to keep the trace, for `replay`")
    arguments = parser.parse_args()
    config = job(arguments.steps, arguments.schedule, arguments.step_s)
    fault = Fault(victim=arguments.victim, slowdown=arguments.slowdown, heals_at=arguments.heals_at)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        story = run(config, fault, folder, may_leave_out=arguments.may_leave_out)
        for line in story.lines:
            if "event" in line:
                print({k: line[k] for k in ("event", "generation", "step", "took_s") if k in line})
        for incident in story.incidents:
            print({k: incident.get(k) for k in ("kind", "rank", "slowdown", "tier", "actions")})
        found = judge(story, config, fault, folder)
        if arguments.record is not None:
            shutil.copytree(folder / "record", arguments.record, dirs_exist_ok=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
