"""What one report of a large fleet costs the controller: frames of its front in, a new state out.

`python -m benchmarks.ingest_cost`; a minute, one core. The agents of `ingest_scale` (kernels each
second, eight devices every five, a step of eight ranks every ten), their reports as the front hands
them on: some hundred frames at once, those of a job mixed with those of others. Timed: CPU of
`agent_service.AgentControl.take` (bytes to values, their numbers) and of `machine.advance` (the
state), without sockets, store or acknowledgements. Prints microseconds a report, of reports with a
step and of those without; last one line of JSON. `--against DIR` runs another checkout too, in
turns, and prints how many times faster this one is.
"""

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median

from benchmarks.fleet_reports import DEVICES, Job, body_of
from pacekeeper.controller.api.auth.peer_identity import PeerIdentity
from pacekeeper.controller.app.controller import preload_numerics
from pacekeeper.controller.ingest import ipc
from pacekeeper.controller.ingest.agent_service import AgentControl
from pacekeeper.controller.ingest.ipc import Frame
from pacekeeper.controller.machine import machine
from pacekeeper.controller.machine.report_parsing import merge_reports
from pacekeeper.controller.state.events import Event
from pacekeeper.controller.state.state import State
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.protos import control_pb2
from pacekeeper.protos.convert.reports import PROTOCOL_VERSION

STEP_EVERY = 10  # reports
SHARED = ("agents", "nodes-per-job", "at-once", "steps")  # by both sides of a comparison
CONFIG = ControllerConfig()
WARM_STEPS = CONFIG.detector.skip_steps + CONFIG.detector.warmup_steps + 4


class Fleet:
    """Agents that report, and the controller's part that takes it in."""

    def __init__(self, num_agents: int, nodes_per_job: int, at_once: int) -> None:
        self.state = State()
        self.at_once = at_once
        self.machine_s = 0.0
        self.now_s = 1000.0
        self._random = Random(11)
        jobs = [
            Job(
                name=f"job-{first // nodes_per_job}",
                nodes=range(first, min(first + nodes_per_job, num_agents)),
                step_every=STEP_EVERY,
            )
            for first in range(0, num_agents, nodes_per_job)
        ]
        for job in jobs:
            job.lay_out()
        self._bodies = [
            body_of(node, job, place) for job in jobs for place, node in enumerate(job.nodes)
        ]
        self.jobs = jobs
        self.control = AgentControl(
            put=self._put, on_rejected=lambda: None, on_failure=_fail, say=lambda _: None
        )

    def hellos(self) -> list[Frame]:
        """All agents attach."""
        shown = PeerIdentity(peer="ipv4:10.0.0.1:1").to_bytes()
        frames = []
        for node in range(len(self._bodies)):
            hello = control_pb2.Hello(
                protocol_version=PROTOCOL_VERSION,
                product_version="0",
                node=f"node-{node:05d}",
                agent_incarnation="a",
            )
            first = control_pb2.AttachRequest(hello=hello).SerializeToString()
            frames.append((ipc.OPENED, node + 1, 0, ipc.join_header(shown, first)))
        return frames

    def reports(self, number: int) -> list[Frame]:
        """The same report of all, jobs mixed, the nodes of each in order of arrival."""
        frames = []
        for node, body in enumerate(self._bodies):
            report = control_pb2.AttachRequest()
            report.report.ParseFromString(body(number, self.now_s))
            report.report.sequence, report.report.sent_mono_s = number, self.now_s
            frames.append((ipc.REPORT, node + 1, number, report.SerializeToString()))
        self._random.shuffle(frames)
        return frames

    async def _put(self, events: Sequence[Event]) -> None:
        began_s = time.thread_time()
        for event in merge_reports(events):
            self.state, _ = machine.advance(self.state, event, config=CONFIG, now_s=self.now_s)
        self.machine_s += time.thread_time() - began_s

    async def take(self, frames: Sequence[Frame]) -> tuple[float, float]:
        """(CPU seconds of reading, of the machine) for these frames."""
        self.now_s += 1.0
        self.machine_s, began_s = 0.0, time.thread_time()
        for first in range(0, len(frames), self.at_once):
            await self.control.take(frames[first : first + self.at_once])
        return time.thread_time() - began_s - self.machine_s, self.machine_s


def _fail(what: str, error: Exception) -> None:
    raise AssertionError(what) from error


async def measure(fleet: Fleet, num_steps: int) -> dict[str, float]:
    """Microseconds a report, medians over steps."""
    await fleet.take(fleet.hellos())
    found: dict[str, list[float]] = {
        name: [] for name in ("read_step", "machine_step", "read_plain", "machine_plain")
    }
    warm = range(0, WARM_STEPS * STEP_EVERY, STEP_EVERY)  # the job's speeds are known by then
    for number in warm:
        await fleet.take(fleet.reports(number))
    last = warm.stop + num_steps * STEP_EVERY
    for number in range(warm.stop, last):
        frames = fleet.reports(number)
        read_s, machine_s = await fleet.take(frames)
        kind = "step" if number % STEP_EVERY == 0 else "plain"
        found[f"read_{kind}"].append(read_s / len(frames) * 1e6)
        found[f"machine_{kind}"].append(machine_s / len(frames) * 1e6)
    steps = {job.name: fleet.state.jobs[job.name].progress.step for job in fleet.jobs}
    newest = (last - 1) // STEP_EVERY - 1
    assert set(steps.values()) == {newest}, f"every step is judged, up to {newest}: {steps}"
    result = {f"{name}_us": median(values) for name, values in found.items()}
    # A node's devices come with every fifth of them: that is no median's matter.
    plain = [
        sum(found[f"{part}_plain"]) / len(found[f"{part}_plain"]) for part in ("read", "machine")
    ]
    of_step = result["read_step_us"] + result["machine_step_us"]
    result["mean_us"] = (of_step + (STEP_EVERY - 1) * sum(plain)) / STEP_EVERY
    return result


def elsewhere(folder: Path, arguments: Sequence[str]) -> dict[str, float]:
    """The same reports to the controller of another checkout."""
    own = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{folder / 'src'}:{own}"}
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env=environment, check=True, text=True, capture_output=True,
    )  # fmt: skip
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])["us"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="not used: all reports are made here")
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--nodes-per-job", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=160, help="frames that come together")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--against", type=Path, help="another checkout")
    options = parser.parse_args()
    preload_numerics()
    gc.set_threshold(100_000, 50, 1000)  # as in `cli/services/controller.py`
    fleet = Fleet(options.agents, options.nodes_per_job, options.at_once)
    found = asyncio.run(measure(fleet, options.steps))
    for name, value in found.items():
        print(f"{name:<18}{value:10.1f}")
    result: dict[str, object] = {
        "agents": options.agents, "ranks": options.agents * DEVICES, "us": found,
    }  # fmt: skip
    if options.against is not None:
        own = [f"--{name}={vars(options)[name.replace('-', '_')]}" for name in SHARED]
        other = elsewhere(options.against, own)
        times = {name: other[name] / value for name, value in found.items()}
        result |= {"other_us": other, "times_faster": times}
        for name, value in times.items():
            print(f"{name:<18}{value:10.2f} times faster")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
