"""How long a fleet is without a leader, and what is lost or done twice, whatever fails.

Two real controllers on one PostgreSQL, each behind a proxy that loses bytes; two real agents; a
live job on paper whose rank is slow now and then, so that plans go out and home again; and for each
fault a job that loses a rank at a random moment about it. A fifth of the faults run through
pgbouncer in transaction mode, a tenth moves the controllers' own clocks. `FAULTS`, `CLOCKS` and
`POOLED` say what is done; each is undone before the next.

`leads_s`: from the begin of the fault (where the database was away, or the next leader's store did
not answer: from its end) to a later term; the leader may also go on. `serves_s`: to a controller
that serves. `commands_s`: to all agents being with it.

At the end the database must have each incident that was ever listed, and one for each lost rank;
ranks recorded every command. Bars: 0 lost, 0 doubled, no command of an earlier term, no term with
two leaders; plans were told and leaders changed; every fault had an effect (processes ended or
stopped, bytes discarded, connections reset, a disk reported as full, a clock that differs); another
leads within the lease's duration + 1.5 s, after faults that end the leader in the median within
+ 0.5 s; it serves within 5 durations, and all agents are with it within 10.

Needs PostgreSQL; pgbouncer, faketime and the right to mount for the faults that use them (Debian's
packages). Faults that are left out for want of these are named and counted, and the run has not
passed. Prints a table, last one line of JSON.
"""

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import grpc
import psycopg
from psycopg.rows import class_row

from benchmarks.failover_faults import CLOCKS, FAULTS, LOSES, POOLED, Fault, Fleet
from benchmarks.failover_fleet import KnownIncident, Node, Ranks, Terms, lose_a_rank
from benchmarks.failover_tally import DURATION_S, Tally, Times
from pacekeeper.protos import status_pb2

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.controllers import until
from support.database_faults import (
    DatabaseProxy,
    MovedClock,
    Pooler,
    SmallDisk,
    faketime,
    restart,
    small_disk,
)
from support.failover import Pair
from support.postgres import Cluster, cluster, new_database

LEASE = f"[lease]\nduration_s = {DURATION_S}\nrenew_s = 0.5\nmargin_s = 0.4\n"
PATIENCE_S = 120.0
SETTLE_S = 60.0
DISK_MEGABYTES = 256
LOSSES_ON_FULL_DISK = 12  # so that tables have to grow


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """The wall clocks of the database server and of each controller; none: they cannot be moved."""

    server: MovedClock
    controllers: Sequence[MovedClock]


class Run:
    """One fleet under faults."""

    def __init__(
        self,
        folder: Path,
        server: Cluster,
        random: Random,
        *,
        clocks: Clocks | None = None,
        disk: SmallDisk | None = None,
        is_pooled: bool = False,
    ) -> None:
        self.random, self.server, self.clocks, self.disk = random, server, clocks, disk
        self._url = new_database(server.url())
        database = self._url.rpartition("/")[2]
        (folder / "pooler").mkdir(parents=True)
        self.pooler = Pooler(folder / "pooler", server.port) if is_pooled else None
        target = server.port if self.pooler is None else self.pooler.port
        self.proxies = [DatabaseProxy(target) for _ in range(2)]
        first, second = (
            f"postgresql://postgres@127.0.0.1:{p.port}/{database}" for p in self.proxies
        )
        moved = clocks.controllers if clocks is not None else ()
        environments = [dict(one.environment) for one in moved] or [{}, {}]
        for environment in environments:
            environment["PYTHONFAULTHANDLER"] = "1"  # SIGABRT writes all stacks to the log
        self.pair = Pair(folder, (first, second), LEASE, environments=environments)
        self._folder, self.nodes = folder, list[Node]()
        self.leader = 0
        self.terms = Terms(self._url)
        self.listed: set[KnownIncident] = set()
        self.times: dict[str, list[Times]] = {}
        self._rings: list[object] = []
        self._losing = threading.Lock()
        self.lost_ranks: set[str] = set()  # the jobs that lost one
        self.num_effects = 0  # beside those of the proxies
        self.without_effect: list[str] = []
        self.left_out: list[str] = []

    def start(self) -> None:
        """Start all; wait for a leader and all agents, then begin with the live job."""
        for index in range(2):
            self.pair.start(index)
            self.nodes.append(Node(self._folder, f"n{index}", self.pair.both))
        self.leader = self.pair.leader()
        self._await_all()
        self.ranks = Ranks(self.nodes)

    def fault(self, kind: Fault, name: str) -> Times:
        """One fault, with a rank lost within a second of it; returns when the fleet is whole."""
        time.sleep(self.random.uniform(0.2, 1.5))
        node = self.random.choice(self.nodes)
        loss = threading.Timer(self.random.uniform(0.0, 1.5), self._lose, (node, f"lost-{name}"))
        loss.daemon = True
        loss.start()
        time.sleep(self.random.uniform(0.0, 1.0))
        self._remember()
        effects = self._effects()
        term, victim = self.terms.look(), self.leader
        began_s = time.monotonic()
        undo = self._strike(kind.name, victim, name)
        if not kind.is_lasting:
            undo()
            began_s = time.monotonic()
            newest = self._await_leader(0)
            leads_s = None if newest == term else self._since(newest, began_s)
        else:
            newest = self._await_leader(term, but=victim)
            leads_s = self._since(newest, began_s)
            time.sleep(self.random.uniform(0.0, 1.0))
        serves_s = time.monotonic() - began_s
        if kind.is_lasting:
            undo()
        times = Times(leads_s=leads_s, serves_s=serves_s, commands_s=self._await_all() - began_s)
        loss.join()
        self.times.setdefault(kind.name, []).append(times)
        if self._effects() == effects:
            self.without_effect.append(name)
        return times

    def _effects(self) -> int:
        """A number that grows when a fault has an effect."""
        return self.num_effects + sum(proxy.num_effects for proxy in self.proxies)

    def _strike(self, kind: str, victim: int, name: str) -> Callable[[], None]:
        """Begin a fault; what ends it."""
        match kind:
            case "kill leader":
                return self._kill(victim)
            case "kill standby":
                return self._kill(1 - victim)
            case "freeze leader":
                return self._freeze(victim)
            case "freeze in transaction":
                return self._freeze_in_transaction(victim, name)
            case "kill leader, server's clock -1 h":
                return self._with_clock(self._kill(victim), None)
            case "kill leader, next one's answers lost":
                self._silence_next(victim)
                return self.proxies[1 - victim].heal
            case "kill leader, standby's clock -1 h":
                return self._with_clock(self._kill(victim), 1 - victim)
            case "freeze in transaction, server's clock -1 h":
                return self._with_clock(self._freeze_in_transaction(victim, name), None)
            case "server's clock +1 h":
                self._move_clock("+1h", None, name)
            case "leader's clock +1 h":
                self._move_clock("+1h", victim, name)
            case "leader's clock -1 h":
                self._move_clock("-1h", victim, name)
            case "kill agent":
                node = self.random.choice(self.nodes)
                self.num_effects += node.kill() == -signal.SIGKILL
                time.sleep(1.0)
                node.start()
            case "disk full":
                self._fill(name)
            case _:
                self._strike_database(kind, self.proxies[victim], name)
        return self.proxies[victim].heal

    def _strike_database(self, kind: str, proxy: DatabaseProxy, name: str) -> None:
        """Restart the server or the pooler, or begin to lose bytes."""
        if kind in LOSES:
            for flag in LOSES[kind]:
                setattr(proxy, flag, True)
            self._lose(self.nodes[0], f"written-{name}")  # something to write
        match kind:
            case "connections reset":
                for one in self.proxies:
                    one.cut()
            case "server restart":
                self._restart("fast", 3.0)
            case "server crash":
                self._restart("immediate", 1.0)
            case "kill pgbouncer":
                assert self.pooler is not None
                self.num_effects += self.pooler.kill() == -signal.SIGKILL
                time.sleep(self.random.uniform(0.0, 3.0))
                self.pooler.start()
            case "commits unanswered":
                time.sleep(1.0)

    def _restart(self, how: str, longest_s: float) -> None:
        before = self.server.pid
        restart(self.server, how, lambda: time.sleep(self.random.uniform(0.0, longest_s)))
        self.num_effects += self.server.pid != before

    def _freeze(self, victim: int) -> Callable[[], None]:
        process = self.pair.processes[victim]
        assert process is not None
        self.pair.signal(victim, signal.SIGSTOP)
        state = Path(f"/proc/{process.process.pid}/stat")
        until("it is stopped", lambda: state.read_text().rpartition(") ")[2].startswith("T"))
        self.num_effects += 1
        return lambda: self.pair.signal(victim, signal.SIGCONT)

    def _freeze_in_transaction(self, victim: int, name: str) -> Callable[[], None]:
        process, proxy = self.pair.processes[victim], self.proxies[victim]
        assert process is not None
        proxy.freeze_in_transaction(process.process.pid)
        self._lose(self.nodes[0], f"written-{name}")  # something to write
        assert proxy.has_frozen.wait(PATIENCE_S), "nothing was written"
        return lambda: self.pair.signal(victim, signal.SIGCONT)

    def _with_clock(self, undo: Callable[[], None], of: int | None) -> Callable[[], None]:
        """Set a clock back, too, until `undo`."""
        self._set_clock("-1h", of)

        def restore() -> None:
            self._set_clock("+0", of)
            undo()

        return restore

    def _move_clock(self, offset: str, of: int | None, name: str) -> None:
        """Move a clock for two durations of the lease, with something to write."""
        self._set_clock(offset, of)
        self._lose(self.nodes[0], f"written-{name}")
        time.sleep(2.0 * DURATION_S)
        self._set_clock("+0", of)

    def _set_clock(self, offset: str, of: int | None) -> None:
        """Move the clock of a controller; None: of the server."""
        assert self.clocks is not None
        clock = self.clocks.server if of is None else self.clocks.controllers[of]
        clock.set(offset)
        process = None if of is None else self.pair.processes[of]
        assert of is None or process is not None
        assert clock.is_of(self.server.pid if process is None else process.process.pid)
        self.num_effects += 1

    def _silence_next(self, victim: int) -> None:
        """Kill the leader; the next one, which hears no answers of its store, must give up."""
        term, proxy = self.terms.look(), self.proxies[1 - victim]
        proxy.loses_next = True
        heard = proxy.num_effects
        self._kill(victim)()
        self._until("the next one asks", lambda: proxy.num_effects > heard)
        self._until("the next one gives up", lambda: self.terms.look() > term + 1)

    @staticmethod
    def _until(what: str, holds: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < give_up_s, f"never: {what}"
            time.sleep(0.02)

    def _kill(self, index: int) -> Callable[[], None]:
        self.num_effects += self.pair.kill(index) == -signal.SIGKILL

        def start() -> None:
            time.sleep(1.0)
            self.pair.start(index)

        return start

    def _fill(self, name: str) -> None:
        """The disk is full until a controller says so, or for ten seconds."""
        assert self.disk is not None
        said = [self.pair.log(i).count("No space left") for i in range(2)]
        self.disk.fill()
        for number in range(LOSSES_ON_FULL_DISK):
            self._lose(self.nodes[number % 2], f"full-{name}-{number}")
        give_up_s = time.monotonic() + 10.0
        while time.monotonic() < give_up_s and self.server.is_running:
            if [self.pair.log(i).count("No space left") for i in range(2)] != said:
                self.num_effects += 1
                time.sleep(2.0)
                break
            time.sleep(0.1)
        self.num_effects += not self.server.is_running
        self.disk.empty()
        if not self.server.is_running:  # its log had no room
            self.server.stop()
            self.server.start()

    def _await_leader(self, above: int, but: int | None = None) -> int:
        """The term of the leader that serves; `above`: it has to be later than this."""
        give_up_s = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < give_up_s, "no controller leads"
            term = self.terms.look()
            if term > above:
                for index in (0, 1):
                    if index == but or self.pair.processes[index] is None:
                        continue
                    if self.pair.is_leading(index):
                        self.leader = index
                        return term
            time.sleep(0.02)

    def _since(self, term: int, began_s: float) -> float:
        return max(0.0, self.terms.seen[term].first_s - began_s)

    def _await_all(self) -> float:
        """When every agent is attached to a leader."""
        give_up_s = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < give_up_s, "agents stay away"
            for index in (self.leader, 1 - self.leader):
                process = self.pair.processes[index]
                if process is None:
                    continue
                with suppress(grpc.RpcError):
                    nodes = process.status.ListNodes(status_pb2.ListNodesRequest(), timeout=1.0)
                    here = sum(node.is_connected for node in nodes.nodes) == len(self.nodes)
                    if here and self.pair.is_leading(index):
                        self.leader = index
                        return time.monotonic()
            time.sleep(0.05)

    def _lose(self, node: Node, job: str) -> None:
        rings = lose_a_rank(node, job)
        with self._losing:
            self._rings += rings
            self.lost_ranks.add(job)

    def _remember(self) -> None:
        """What is listed now must never be unknown again."""
        process = self.pair.processes[self.leader]
        assert process is not None
        with suppress(grpc.RpcError):
            request = status_pb2.ListIncidentsRequest()
            for one in process.status.ListIncidents(request, timeout=2.0).incidents:
                self.listed.add(
                    KnownIncident(
                        incident_id=one.incident_id, job=one.job, kind=one.kind, rank=one.rank
                    )
                )

    def stored(self) -> list[KnownIncident]:
        """All incidents in the store, once every loss has had its time."""
        give_up_s = time.monotonic() + SETTLE_S
        while True:
            with psycopg.connect(self._url, row_factory=class_row(KnownIncident)) as store:
                found = store.execute(
                    "SELECT incident_id, job, kind, COALESCE(rank, 0) AS rank FROM incidents"
                ).fetchall()
            if self.lost_ranks <= {one.job for one in found} or time.monotonic() > give_up_s:
                return found
            time.sleep(0.5)

    def close(self) -> None:
        """Nothing of it goes on."""
        if hasattr(self, "ranks"):
            self.ranks.close()
        self.terms.close()
        for node in self.nodes:
            node.kill()
        self.pair.__exit__()
        for proxy in self.proxies:
            proxy.close()
        if self.pooler is not None:
            self.pooler.kill()


@contextlib.contextmanager
def running(
    folder: Path, random: Random, *, is_pooled: bool = False, moves_clocks: bool = False
) -> Iterator[Run]:
    """A fleet with what this host offers."""
    with contextlib.ExitStack() as stack:
        library, clocks = faketime(), None
        if library is not None:
            clocks = Clocks(
                server=MovedClock(folder / "clock", library),
                controllers=[
                    MovedClock(folder / f"clock-{i}", library) for i in range(2 * moves_clocks)
                ],
            )
        disk = stack.enter_context(small_disk(DISK_MEGABYTES))
        server = stack.enter_context(
            cluster(
                "min_wal_size=32MB",
                "max_wal_size=64MB",
                root=None if disk is None else disk.folder,
                environment=None if clocks is None else clocks.server.environment,
            )
        )
        run = Run(folder / "run", server, random, clocks=clocks, disk=disk, is_pooled=is_pooled)
        stack.callback(run.close)
        try:
            run.start()
            yield run
        except BaseException:
            for index in range(len(run.nodes)):
                if run.pair.processes[index] is not None:
                    run.pair.signal(index, signal.SIGCONT)
                    run.pair.signal(index, signal.SIGABRT)
                    time.sleep(1.0)
                print(f"c{index}:\n{run.pair.log(index)[-9000:]}", file=sys.stderr)
                print(f"n{index}:\n{run.nodes[index].log[-2000:]}", file=sys.stderr)
            raise


def schedule(run: Run, kinds: Sequence[Fault], count: int) -> list[Fault]:
    """Each kind that this host can do about equally often, in random order; the rest is named."""
    has = {"": True, "faketime": run.clocks is not None, "mount": run.disk is not None}
    able = [kind for kind in kinds if has[kind.needs]]
    for kind in kinds:
        if kind not in able:
            run.left_out.append(f"{kind.name} (needs {kind.needs})")
    found = [able[number % len(able)] for number in range(count if able else 0)]
    run.random.shuffle(found)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="not used: all data is made here")
    parser.add_argument(
        "--engine",
        choices=["postgresql"],
        default="postgresql",
        help="SQLite has one controller, so nothing fails over: its kills and its full disk are in "
        "tests/integration/controller (test_store_kill, test_failures)",
    )
    parser.add_argument("--faults", type=int, default=20, help="100 for the whole")
    parser.add_argument("--only", help="names of faults, separated by semicolons; not pooled")
    parser.add_argument("--seed", type=int, default=7)
    asked = parser.parse_args()
    only = asked.only.split(";") if asked.only else []
    if unknown := set(only) - {kind.name for kind in (*FAULTS, *CLOCKS)}:
        parser.error(f"--only: no such fault: {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, _end)
    tally = Tally(asked=asked.faults)
    num_pooled = 0 if only else asked.faults // 5
    if num_pooled and not Pooler.found():
        tally.left_out += [f"{kind.name} (needs pgbouncer)" for kind in POOLED]
        num_pooled = 0
    random = Random(asked.seed)
    direct = [kind for kind in FAULTS if not only or kind.name in only]
    clocks = [kind for kind in CLOCKS if not only or kind.name in only]
    num_clocks = 0 if not clocks else asked.faults // 10 if direct else asked.faults
    for fleet in (
        Fleet(name="direct", faults=direct, count=asked.faults - num_pooled - num_clocks),
        Fleet(name="clocks", faults=clocks, count=num_clocks, moves_clocks=True),
        Fleet(name="pgbouncer", faults=POOLED, count=num_pooled, is_pooled=True),
    ):
        if fleet.count:
            run_fleet(fleet, random, tally)
    found = tally.figures()
    tally.show(found)
    print(json.dumps({"engine": asked.engine, "seed": asked.seed, **found}))
    return 0 if found["passed"] else 1


def _end(*_: object) -> None:
    """End once, so that everything is undone."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def run_fleet(fleet: Fleet, random: Random, tally: Tally) -> None:
    """Run all faults on a new pair of controllers; add what was found to `tally`."""
    with tempfile.TemporaryDirectory(prefix="failover-") as root:
        folder = Path(root)
        folder.chmod(0o755)
        with running(
            folder, random, is_pooled=fleet.is_pooled, moves_clocks=fleet.moves_clocks
        ) as run:
            for number, kind in enumerate(schedule(run, fleet.faults, fleet.count)):
                times = run.fault(kind, f"{fleet.name}-{number}")
                lead = "goes on" if times.leads_s is None else f"leads {times.leads_s:.1f} s"
                line = f"{fleet.name} {number + 1:3d} {kind.name:42s} c{run.leader} {lead}"
                print(f"{line}, commands {times.commands_s:.1f} s", file=sys.stderr, flush=True)
            tally.add(run, run.stored(), fleet.name)


if __name__ == "__main__":
    sys.exit(main())
