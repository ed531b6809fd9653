"""One job of 8,192 ranks from end to end: is it found, decided, moved and mended over real gRPC?

`python -m benchmarks.large_job`; some minutes, two cores. The real `pacekeeper controller` on one
core; on the other 1,024 paper agents with eight ranks each (`large_job_ranks`), a connection each,
that tell a step as soon as the one before the last is acknowledged. In turn: all attach; the cost
model is learnt; one rank gets long sequences and one expert becomes hot, which must accuse nobody;
one rank becomes slow, until a plan for it is in force, and well again, until the way home is; a
node is lost and the others go on; all ranks end. Ends with code 1 where anybody else was accused
or one of these did not come about. `wait_max_s`: the longest that a newcomer waited for its
welcome in that part: what everybody waits for. Last line: JSON.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table

from benchmarks.agent_swarm import Agent, Swarm
from benchmarks.fleet_reports import DEVICES, body_of
from benchmarks.ingest_scale import Controller, running
from benchmarks.large_job_ranks import JOB, InjectedFault, PaperJob
from pacekeeper.core.incidents.findings import FindingKind
from pacekeeper.core.incidents.rank_ranges import format_ranges, merge_ranges
from pacekeeper.protos import control_pb2, status_pb2, status_pb2_grpc

PERIOD_S = 1.0  # of reports
NOBODY_TWICE_S = 1e-6  # less than between two agents of a lap
STEPS_AHEAD = 2
WARM_STEPS, QUIET_STEPS, AFTER_STEPS = 17, 4, 4
SLOWDOWN, LONGER, HOTTER = 1.6, 4.0, 6.0
ACCUSING = (FindingKind.DEVICE.value, FindingKind.LINK.value, FindingKind.HOST.value)


class LockStep(Swarm):
    """Agents of one job: nobody tells a step before all have told the one before the last."""

    def __init__(self, address: tuple[str, int], agents: list[Agent], job: PaperJob) -> None:
        super().__init__(address, agents, period_s=PERIOD_S)
        self.job = job
        self.is_begun = False
        self.first_offer_s = self.last_offer_s = 0.0
        self.offered_bytes = 0

    def lose(self, node: int) -> None:
        """A node is gone, with its agent."""
        agent = self.agents[node]
        self._forget(agent)
        agent.sequence = 0
        agent.spool.clear()

    def _speak(self, now_s: float) -> None:
        self.is_begun = self.is_begun or self.num_welcome == len(self.agents)
        if not self.is_begun:  # the job's first step comes when all its ranks are there
            self._lap_s = now_s
            return
        if self._at == 0:
            if self.num_waiting > STEPS_AHEAD * len(self.agents):
                return
            # All are due, and none twice: ranks of one job end a step together.
            self._lap_s = now_s - self.period_s + NOBODY_TWICE_S
        super()._speak(now_s)

    def _hear(self, agent: Agent, message: control_pb2.AttachResponse, now_s: float) -> None:
        super()._hear(agent, message, now_s)
        if message.WhichOneof("message") == "offer_plan" and agent is not self._probe:
            offer = message.offer_plan
            self.offered_bytes += len(offer.layout_json)
            self.job.hear(agent.number, offer.layout_json, offer.generation)
            self.first_offer_s = self.first_offer_s or now_s
            self.last_offer_s = now_s


@dataclass(slots=True, eq=False, kw_only=True)
class Run:
    """One controller, its job, and what was seen of them."""

    controller: Controller
    swarm: LockStep
    job: PaperJob
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    patience_s: float = 120.0  # for each part
    failed: list[str] = field(default_factory=list)
    status: Any = field(init=False)  # the stub of its status service

    def __post_init__(self) -> None:
        options = [("grpc.max_receive_message_length", 1 << 30)]
        channel = grpc.insecure_channel(self.controller.api, options=options)
        self.status = status_pb2_grpc.StatusServiceStub(channel)

    def incidents(self) -> list[Any]:
        """All that the controller tells."""
        listing = status_pb2.ListIncidentsRequest(job=JOB)
        return list(self.status.ListIncidents(listing, timeout=60.0).incidents)

    def log(self) -> str:
        """What the controller said."""
        return self.controller.log.read_text()

    def part(self, name: str, until: Callable[[], bool]) -> dict[str, Any]:
        """Let steps pass until something holds: seconds, steps, processor time, waits."""
        swarm, before = self.swarm, self.controller.spent_s()
        swarm.counts.probes.clear()
        first, began_s = self.job.newest, time.monotonic()
        is_met = False

        def look() -> bool:
            nonlocal is_met
            is_met = until()
            return is_met

        swarm.run(self.patience_s, until=look)
        took_s = time.monotonic() - began_s
        spent = self.controller.spent_s()
        steps = self.job.newest - first
        cpu_s = sum(spent.values()) - sum(before.values())
        found: dict[str, Any] = {
            "steps": steps,
            "seconds": round(took_s, 2),
            "core": round(cpu_s / took_s, 2),
            "cpu_s_per_step": round(cpu_s / max(1, steps), 2),
            "wait_max_s": round(max(swarm.counts.probes, default=float("nan")), 2),
            "memory_mb": round(sum(self.controller.memory_bytes().values()) / 1e6),
        }
        if not is_met:
            self.failed.append(f"{name}: not within {self.patience_s:g} s")
        self.parts[name] = found
        print(f"{name}: {found}", file=sys.stderr, flush=True)
        return found

    def steps(self, name: str, number: int) -> dict[str, Any]:
        """So many steps more."""
        goal = self.job.newest + number
        return self.part(name, lambda: self.job.newest >= goal)

    def accused(self, *, but: int | None = None) -> list[str]:
        """Who was called slow and is not."""
        return [
            f"incident {one.incident_id}: {one.kind} rank {one.rank} x{one.slowdown:.2f}"
            for one in self.incidents()
            if one.kind in ACCUSING and (but is None or one.rank != but)
        ]


def play(run: Run) -> None:
    """All parts, one after the other."""
    job, swarm = run.job, run.swarm
    swarm.attach_within(2.0)
    run.part("attach", lambda: swarm.is_begun)
    run.steps("learn", WARM_STEPS)
    longer = InjectedFault(
        first=job.newest + 2,
        end=job.newest + 2 + QUIET_STEPS,
        rank=job.num_ranks // 3,
        longer=LONGER,
    )
    job.troubles.append(longer)
    run.steps("long_sequences", QUIET_STEPS + STEPS_AHEAD)
    hot = InjectedFault(first=job.newest + 2, end=job.newest + 2 + QUIET_STEPS, hotter=HOTTER)
    job.troubles.append(hot)
    run.steps("hot_expert", QUIET_STEPS + STEPS_AHEAD)
    run.failed += [f"{one} (while nobody was slow)" for one in run.accused()]
    slow_rank(run)
    lost_node(run)
    ended(run)


def slow_rank(run: Run) -> None:
    """A fault, what is found, decided and moved; then its end, and the way home."""
    job, swarm, rank = run.job, run.swarm, run.job.num_ranks // 2 + 1
    fault = InjectedFault(first=job.newest + 2, rank=rank, slowdown=SLOWDOWN)
    job.troubles.append(fault)
    swarm.first_offer_s, swarm.offered_bytes = 0.0, 0
    run.part("fault_to_offer", lambda: bool(swarm.first_offer_s))
    finding = next((one for one in run.incidents() if one.rank == rank), None)
    if finding is None:
        run.failed.append(f"rank {rank} was not found")
        return
    found = run.parts["fault_to_offer"]
    opened_s = finding.opened_unix_s - time.time() + time.monotonic()
    found["found_after_steps"] = finding.found_step - fault.first + 1
    found["slowdown"] = round(finding.slowdown, 2)
    found["decision_s"] = round(swarm.first_offer_s - opened_s, 2)
    generation = job.layout.generation
    moved = run.part("offer_to_in_force", lambda: in_force(run, generation + 1))
    moved["all_heard_s"] = round(swarm.last_offer_s - swarm.first_offer_s, 2)
    moved["offered_mb"] = round(swarm.offered_bytes / 1e6)
    run.steps("under_the_plan", AFTER_STEPS)
    job.troubles.remove(fault)
    swarm.first_offer_s = 0.0
    generation = job.layout.generation
    run.part("healed_to_home", lambda: in_force(run, generation + 1))
    run.failed += [f"{one} (beside the slow one)" for one in run.accused(but=rank)]
    still = [one for one in run.incidents() if one.rank == rank and not one.closed_unix_s]
    run.failed += [f"incident {one.incident_id} is still open" for one in still]


def in_force(run: Run, generation: int) -> bool:
    """Has the controller seen that all run this layout, or a later one?"""
    return f"job={JOB} generation={generation} in force" in run.log()


def lost_node(run: Run) -> None:
    """A node of eight ranks is gone at once; the others go on without it."""
    node, generation = run.job.num_nodes // 3, run.job.layout.generation
    run.swarm.lose(node)
    run.job.die(node)
    run.part("node_lost", lambda: in_force(run, generation + 1))
    run.steps("after_the_loss", AFTER_STEPS)
    told = [one for one in run.incidents() if one.kind == FindingKind.DEATH.value]
    deaths = merge_ranges(
        (r.first, r.last) for one in told for part in one.deaths for r in part.ranks
    )
    if len(told) != 1 or deaths != ((node * DEVICES, (node + 1) * DEVICES - 1),):
        run.failed.append(f"dead are {format_ranges(deaths)} in {len(told)} incidents")


def ended(run: Run) -> None:
    """All ranks finish at once."""
    run.job.is_over = True
    run.part("ended", lambda: f"job={JOB} watch=ended" in run.log())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="not used: all reports are made here")
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--replicas", type=int, default=32)
    parser.add_argument("--patience", type=float, default=120.0, help="seconds, for each part")
    parser.add_argument("arguments", nargs="*", help="more for `pacekeeper controller`, after --")
    options = parser.parse_args()
    job = PaperJob(
        num_nodes=options.nodes,
        num_layers=options.layers,
        num_experts=options.experts,
        replicas=options.replicas,
    )
    agents = [
        Agent(node=f"node-{node:05d}", body=body_of(node, job, node))
        for node in range(options.nodes)
    ]
    began_s = time.monotonic()
    with running(*options.arguments) as controller:
        swarm = LockStep(controller.address, agents, job)
        run = Run(controller=controller, swarm=swarm, job=job, patience_s=options.patience)
        play(run)
        failures = controller.unlabelled_metrics()["pacekeeper_advance_failures_total"]
        run.failed += [f"{failures:g} failures"] if failures else []
        swarm.close()
    table = Table(title=f"a job of {job.num_ranks:,} ranks on {options.nodes:,} nodes")
    for column in ("part", "steps", "seconds", "core", "CPU s a step", "longest wait s", "more"):
        table.add_column(column)
    shown = ("steps", "seconds", "core", "cpu_s_per_step", "wait_max_s")
    for name, values in run.parts.items():
        more = ", ".join(f"{key} {value}" for key, value in values.items() if key not in shown)
        table.add_row(name, *(str(values[key]) for key in shown), more)
    Console(width=160).print(table)
    for text in run.failed:
        print(f"FAILED {text}")
    result = {
        "ranks": job.num_ranks,
        "is_met": not run.failed,
        "failed": run.failed,
        "whole_s": round(time.monotonic() - began_s, 1),
        **run.parts,
    }
    print(json.dumps(result))
    return 0 if not run.failed else 1


if __name__ == "__main__":
    sys.exit(main())
