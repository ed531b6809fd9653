"""Nodes and terms for `failover_time`: real agents, ranks on paper, and who led when.

The ranks write rings and follow plans.

What the ranks are told is written down: a generation that is offered with two contents, a term or
a probe that goes back, a plan that comes into force twice would be a command applied twice.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row

from pacekeeper.core.layout.codec import decode_layout, encode_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.trainer.hooks.ring_writer import Ring

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.controllers import applied, attachments, first_layout, killed, step_records

LIVE = "live"
STEP_S = 0.1
STEPS_PER_MOOD = 60  # healthy, then with a slow rank, then healthy again
SLOW = {1: 1.7}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownIncident:
    """What identifies an incident in a list and in the store."""

    incident_id: int
    job: str
    kind: str
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TermHolder:
    """One start of a controller that leads in a term, first seen at `first_s` (monotonic)."""

    run_id: str
    first_s: float


@dataclass(slots=True, eq=False)
class Terms:
    """Watches the lease's row: the holder of each term."""

    url: str
    seen: dict[int, TermHolder] = field(default_factory=dict)
    doubled: list[int] = field(default_factory=list)
    _connection: Any = None

    def look(self) -> int:
        """The newest term; 0 while the server does not answer."""
        try:
            if self._connection is None:
                self._connection = psycopg.connect(
                    self.url, autocommit=True, connect_timeout=2, row_factory=dict_row
                )
            row = self._connection.execute("SELECT term, run_id FROM leases").fetchone()
        except psycopg.Error:
            self.close()
            return 0
        if row is None:
            return 0
        term, run_id = int(row["term"]), row["run_id"]
        if run_id:
            first = TermHolder(run_id=run_id, first_s=time.monotonic())
            if self.seen.setdefault(term, first).run_id != run_id:
                self.doubled.append(term)
        return term

    def close(self) -> None:
        """Connect anew the next time."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Node:
    """One real agent and the ring directory of its node."""

    def __init__(self, folder: Path, name: str, controllers: str) -> None:
        self.name, self.rings = name, folder / f"rings-{name}"
        self._log = folder / f"agent-{name}.log"
        self._config = folder / f"agent-{name}.toml"
        settings = {
            "ring_dir": str(self.rings),
            "node": name,
            "controller": controllers,
            "metrics_listen": "",
        }
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        self._config.write_text("[agent]\n" + "\n".join(lines) + "\n")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """As after a restart by systemd."""
        line = [sys.executable, "-m", "pacekeeper.cli.main", "agent", "--config"]
        with self._log.open("a") as log:
            self._process = subprocess.Popen([*line, str(self._config)], stderr=log)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def kill(self) -> int:
        """As the power cut would; the exit code."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGKILL)
        return self._process.wait()


class Ranks:
    """The ranks of one live job over two nodes, in a thread; and jobs of which a rank dies."""

    def __init__(self, nodes: list[Node]) -> None:
        self.layout = first_layout()
        self.doubled: list[str] = []  # commands that were told twice
        self.regressed: list[str] = []  # commands of an earlier term, or earlier probe
        self.in_force: list[int] = [self.layout.generation]
        self._contents: dict[int, bytes] = {}
        self._newest: dict[int, tuple[int, int]] = {}  # by rank: term and probe
        told = attachments(LIVE, self.layout.ranks)
        self.rings = [Ring.create(nodes[a.rank % len(nodes)].rings, a) for a in told]
        for one in self.rings:
            one.write_layout(self.layout.generation, encode_layout(self.layout))
        for record, one in zip(applied(self.layout, step=0), self.rings, strict=True):
            one.write(record)
        self._step = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No more steps."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(STEP_S):
            plan = self._offered()
            if plan is not None:
                self.layout = plan
                self.in_force.append(plan.generation)
                for record, one in zip(applied(plan, step=self._step), self.rings, strict=True):
                    one.write(record)
            is_slow = self._step // STEPS_PER_MOOD % 2 == 1
            for fact in step_records(self._step, self.layout, SLOW if is_slow else None):
                self.rings[fact.rank].write(fact)
            self._step += 1

    def _offered(self) -> Layout | None:
        """A plan on the present layout that all ranks have read, as their vote would find."""
        commands = [one.command() for one in self.rings]
        for rank, said in enumerate(commands):
            self._note(rank, said)
        plans = {(said.plan_generation, said.plan_sha256) for said in commands}
        generation, digest = next(iter(plans))
        is_next = commands[0].base_generation == self.layout.generation < generation
        if len(plans) > 1 or not is_next:
            return None
        data = [one.read_plan(generation, digest) for one in self.rings]
        if any(one is None for one in data) or data[0] is None:
            return None
        return decode_layout(data[0])

    def _note(self, rank: int, said: shm_ring.CommandSlot) -> None:
        if said.plan_generation:
            known = self._contents.setdefault(said.plan_generation, said.plan_sha256)
            if known != said.plan_sha256:
                self.doubled.append(f"generation {said.plan_generation} has two contents")
                self._contents[said.plan_generation] = said.plan_sha256
        before = self._newest.get(rank, (0, 0))
        now = (said.term, said.probe)
        if now[0] < before[0] or now[1] < before[1]:
            self.regressed.append(f"rank {rank}: term and probe {before}, then {now}")
        self._newest[rank] = now

    @property
    def num_steps(self) -> int:
        """Steps that the live job has made."""
        return self._step

    @property
    def terms(self) -> set[int]:
        """The newest term of each rank."""
        return {term for term, _ in self._newest.values()}


def lose_a_rank(node: Node, job: str) -> list[Ring]:
    """A job of two ranks on this node, of which one is killed: the incident that must be told."""
    layout = first_layout(2)
    told = list(attachments(job, layout.ranks, world_size=2))
    rings = [Ring.create(node.rings, one) for one in told]
    rings[0].write_layout(layout.generation, encode_layout(layout))
    for record, one in zip(applied(layout, step=0), rings, strict=True):
        one.write(record)
    supervisor = Ring.create(node.rings, told[0], file_name=shm_ring.SUPERVISOR_RING)
    supervisor.write(killed(1))
    return [*rings, supervisor]
