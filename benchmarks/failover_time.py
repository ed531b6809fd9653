"""How long a fleet is without a controller, and what is lost or done twice, whoever is killed.

Two real controllers on one PostgreSQL, two real agents, a live job on paper whose
rank is slow now and then (plans go out and home again), and for each fault one job that loses a
rank at a random moment about it. Faults at random: kill -9 of the leader, the leader frozen for
longer than its lease, kill -9 of the standby, kill -9 of an agent. Each comes back after a second.
`leads_s`: from the fault to another leader that serves; `commands_s`: to all agents being with it.
At the end the store must have each incident that was ever told, one for each lost
rank; ranks wrote down what they were told. Bars: 10 s, 0 lost, 0 doubled.

Needs a PostgreSQL server (Debian: postgresql). Prints a table, last one line of JSON.
"""

import argparse
import json
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import grpc
import psycopg

from benchmarks.failover_fleet import LIVE, Node, Ranks, lose_a_rank
from pacekeeper.protos import status_pb2

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.failover import Pair
from support.postgres import cluster, new_database

BAR_S = 10.0
PATIENCE_S = 60.0
LEASE = "[lease]\n"  # as it is by default
FAULTS = ("kill leader", "freeze leader", "kill standby", "kill agent")
WEIGHTS = (5, 2, 1, 2)
SETTLE_S = 20.0

Known = tuple[int, str, str, int]  # number, job, kind, rank


class Run:
    """One fleet under faults."""

    def __init__(self, folder: Path, url: str, seed: int) -> None:
        self._url, self.random = url, Random(seed)
        self.pair = Pair(folder, url, LEASE)
        self.pair.start(0)
        self.pair.start(1)
        self.nodes = [Node(folder, f"n{i}", self.pair.both) for i in range(2)]
        self.leader = self.pair.leader()
        self._await_all(time.monotonic())
        self.ranks = Ranks(self.nodes)
        self.told: set[Known] = set()
        self.times: dict[str, list[tuple[float, float]]] = {fault: [] for fault in FAULTS}
        self._rings: list[object] = []
        self.num_lost_ranks = 0
        self.num_changes = 0  # takeovers by the other one

    def fault(self, number: int) -> str:
        """One fault, with a rank lost within a second of it; returns when the fleet is whole."""
        time.sleep(self.random.uniform(0.2, 2.0))
        (fault,) = self.random.choices(FAULTS, WEIGHTS)
        node = self.random.choice(self.nodes)
        loss = threading.Timer(self.random.uniform(0.0, 2.0), self._lose, (node, f"lost-{number}"))
        loss.start()
        time.sleep(self.random.uniform(0.0, 1.0))
        self._remember()
        began_s = time.monotonic()
        match fault:
            case "kill leader":
                self._leader_goes(began_s, fault, is_frozen=False)
            case "freeze leader":
                self._leader_goes(began_s, fault, is_frozen=True)
            case "kill standby":
                self.pair.kill(1 - self.leader)
                time.sleep(1.0)
                self.pair.start(1 - self.leader)
            case "kill agent":
                node = self.random.choice(self.nodes)
                node.kill()
                time.sleep(1.0)
                node.start()
                self.times[fault].append((0.0, self._await_all(began_s)))
        loss.join()
        return fault

    def _leader_goes(self, began_s: float, fault: str, *, is_frozen: bool) -> None:
        victim = self.leader
        if is_frozen:
            self.pair.signal(victim, signal.SIGSTOP)
        else:
            self.pair.kill(victim)
        back_s = began_s + self.random.uniform(6.0, 10.0)
        is_back = leads_s = 0.0
        give_up_s = began_s + PATIENCE_S
        while not (is_back and leads_s):
            assert time.monotonic() < give_up_s, "nobody leads"
            if not is_back and time.monotonic() >= back_s:
                is_back = time.monotonic()
                if is_frozen:
                    self.pair.signal(victim, signal.SIGCONT)
                else:
                    self.pair.start(victim)
            asked = (0, 1) if is_back else (1 - victim,)
            for index in asked if not leads_s else ():
                if self.pair.processes[index] is not None and self.pair.is_leading(index):
                    self.leader, leads_s = index, time.monotonic() - began_s
                    commands_s = self._await_all(began_s)
                    self.times[fault].append((leads_s, commands_s))
                    self.num_changes += index != victim
            time.sleep(0.05)

    def _await_all(self, began_s: float) -> float:
        """Seconds until every agent is attached to who leads."""
        give_up_s = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < give_up_s, "agents stay away"
            with suppress(grpc.RpcError):
                asked = self._status().ListNodes(status_pb2.ListNodesRequest(), timeout=1.0)
                if sum(node.is_connected for node in asked.nodes) == len(self.nodes):
                    return time.monotonic() - began_s
            time.sleep(0.05)

    def _status(self) -> Any:
        process = self.pair.processes[self.leader]
        assert process is not None
        return process.status

    def _lose(self, node: Node, job: str) -> None:
        self._rings += lose_a_rank(node, job)
        self.num_lost_ranks += 1

    def _remember(self) -> None:
        """What anybody who asks is told now must never be unknown again."""
        with suppress(grpc.RpcError):
            request = status_pb2.ListIncidentsRequest()
            for one in self._status().ListIncidents(request, timeout=2.0).incidents:
                self.told.add((one.incident_id, one.job, one.kind, one.rank))

    def stored(self) -> list[Known]:
        """All incidents in the store, once every loss has had its time."""
        give_up_s = time.monotonic() + SETTLE_S
        while True:
            with psycopg.connect(self._url) as store:
                rows = store.execute(
                    "SELECT incident_id, job, kind, rank FROM incidents"
                ).fetchall()
            deaths = sum(job != LIVE for _, job, _, _ in rows)
            if deaths >= self.num_lost_ranks or time.monotonic() > give_up_s:
                return [(number, job, kind, rank or 0) for number, job, kind, rank in rows]
            time.sleep(0.5)

    def close(self) -> None:
        """Nothing of it goes on."""
        self.ranks.close()
        for node in self.nodes:
            node.kill()
        self.pair.__exit__()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="not used: all data is made here")
    parser.add_argument("--kills", type=int, default=10, help="100 for the whole")
    parser.add_argument("--seed", type=int, default=7)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="failover-") as folder, cluster() as server:
        run = Run(Path(folder), new_database(server.url()), asked.seed)
        try:
            for number in range(asked.kills):
                fault = run.fault(number)
                print(f"{number + 1:4d} {fault:14s} leader c{run.leader}", file=sys.stderr)
            stored = run.stored()
        finally:
            run.close()
        found = judged(run, stored)
        found["seed"] = asked.seed
    show(run, found)
    print(json.dumps(found))
    return 0 if found["passed"] else 1


def judged(run: Run, stored: list[Known]) -> dict[str, object]:
    """The figures, and whether they are within the bars."""
    deaths = Counter(job for _, job, kind, _ in stored if job != LIVE and kind == "death")
    lost = [one for one in run.told if one not in stored]
    unseen = run.num_lost_ranks - len(deaths)
    doubled = sum(deaths.values()) - len(deaths)
    leads = [lead for fault in FAULTS[:2] for lead, _ in run.times[fault]]
    commands = [command for fault in FAULTS[:2] for _, command in run.times[fault]]
    worst_s = max(commands, default=0.0)
    return {
        "faults": sum(map(len, run.times.values())),
        "takeovers": len(leads),
        "by_the_standby": run.num_changes,
        "leads_median_s": round(statistics.median(leads or [0.0]), 2),
        "leads_max_s": round(max(leads, default=0.0), 2),
        "commands_median_s": round(statistics.median(commands or [0.0]), 2),
        "commands_max_s": round(worst_s, 2),
        "lost_ranks": run.num_lost_ranks,
        "incidents": len(stored),
        "lost_incidents": len(lost) + unseen,
        "doubled_incidents": doubled,
        "plans_applied": len(run.ranks.in_force) - 1,
        "doubled_commands": run.ranks.applied_twice,
        "doubled": run.ranks.doubled[:5],
        "passed": worst_s < BAR_S and not (lost or unseen or doubled or run.ranks.applied_twice),
    }


def show(run: Run, found: dict[str, object]) -> None:
    """For people."""
    print(f"{'fault':14s} {'count':>5s} {'leads s':>18s} {'commands s':>18s}")
    for fault, times in run.times.items():
        if not times:
            continue
        columns = list(zip(*times, strict=True))
        told = [f"{statistics.median(one):.1f} (max {max(one):.1f})" for one in columns]
        print(f"{fault:14s} {len(times):5d} {told[0]:>18s} {told[1]:>18s}")
    print(
        f"ranks lost {found['lost_ranks']}, incidents {found['incidents']}: lost "
        f"{found['lost_incidents']}, doubled {found['doubled_incidents']}; plans applied "
        f"{found['plans_applied']}, commands doubled {found['doubled_commands']}"
    )


if __name__ == "__main__":
    sys.exit(main())
