"""How fast survivors leave a broken group and redo the step: `python -m benchmarks.group_recovery`.

Four ranks make steps of two uneven all-to-alls, an all-reduce of 16 MB and a vote. One of them is
killed, or stopped for good, in a collective. A supervisor notices the death at once, and silence
after 0.5 s; survivors leave, agree on the step through the store, form the next generation and do
the step again. Every result is compared with its exact value. Prints medians of the milliseconds
from the signal on the slowest survivor, for every way that this torch has of forming groups; then
what is left of 20 abandoned generations, and what a small exchange costs beside torch's own call.
The last line is JSON. Tests run the same ranks.
"""

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from multiprocessing.connection import Connection as Pipe
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch._C._distributed_c10d import TCPStore

from benchmarks.rank_processes import end_with_parent
from pacekeeper.trainer.elastic.agreement.two_phase_commit import Phase, Progress, resolve
from pacekeeper.trainer.groups.elastic import Connector, Members
from pacekeeper.trainer.groups.former import Former, Generation
from pacekeeper.trainer.groups.gloo import GlooConnector
from pacekeeper.trainer.groups.group import Group, PeerLost, Pending, TorchGroup
from pacekeeper.trainer.groups.reconfiguring import ReconfiguringConnector, can_reconfigure
from pacekeeper.trainer.groups.waiting import WaitLimits
from pacekeeper.trainer.parallel.mesh.subgroup import SubGroup

SILENCE_S = 0.5
CPU = torch.device("cpu")


def connectors() -> dict[str, Callable[[], Connector]]:
    """The ways of forming groups on the CPU that this torch has."""
    ways: dict[str, Callable[[], Connector]] = {"new": GlooConnector}
    if can_reconfigure(CPU):
        ways["reconfigured"] = lambda: ReconfiguringConnector(CPU)
    return ways


class Moment(StrEnum):
    """Where a rank is struck: between the start of a collective and its end, or while forming."""

    ALL_TO_ALL = "all_to_all"
    ALL_REDUCE = "all_reduce"
    MESSAGES = "messages"  # from rank to rank
    ARRIVED = "arrived"  # all members have come
    CONNECTING = "connecting"  # one group stands, the next one does not


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """Ranks that are struck in a generation, counted from 0."""

    generation: int
    victims: tuple[int, ...]
    moment: Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What ranks do.

    Attributes:
        way: Of forming groups, of `connectors`.
        ranks: Number of ranks at first.
        strikes: By generation.
        signal: That victims send themselves.
        rows: Rows of an all-to-all, for one step of unevenness.
        floats: Of the all-reduce.
        timeout_s: For a silent member.
        is_told: Whether the supervisor tells who is dead or silent; else collectives find out.
    """

    way: str
    ranks: int = 4
    strikes: tuple[Strike, ...] = ()
    signal: str = "SIGKILL"
    rows: int = 256
    floats: int = 2 << 20
    steps_after: int = 2
    timeout_s: float = 20.0
    is_told: bool = True


@dataclass(kw_only=True)
class Survivor:
    """One rank, until all strikes are over."""

    rank: int
    job: Job
    port: int
    told: dict[str, list[float]] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    generation: Generation | None = None

    def run(self) -> dict[str, Any]:
        """Train; what was seen, with the monotonic seconds of each event."""
        connector = connectors()[self.job.way]()
        former = Former(connector, connector)
        number, members, ticket, phase = 0, tuple(range(self.job.ranks)), 0, Phase.PRE
        total = torch.zeros(self.job.floats, dtype=torch.float64)
        part, lost = None, list[bool]()
        threading.Thread(target=self._listen, daemon=True).start()
        last = max((strike.generation for strike in self.job.strikes), default=-1) + 1
        done = 0
        while done < self.job.steps_after:
            try:
                if self.generation is None:
                    self.generation = self._form(former, number, members)
                    self._note("formed")
                phase = Phase.PRE
                part = self._part(self.generation, number, ticket)
                phase = Phase.VOTE
                votes = self.generation.groups.control.all_gather(torch.tensor([ticket]))
                assert votes.flatten().tolist() == [ticket] * len(members)
                total += part
                ticket, phase = ticket + 1, Phase.PRE
                self._note("step")
                done += number >= last
            except PeerLost as error:
                lost.append(error.is_silence)
                self._note("left")
                if self.generation is not None:
                    self.generation.abort()
                self.generation = None
                gone = {v for s in self.job.strikes if s.generation == number for v in s.victims}
                store = self._store()
                living = tuple(member for member in members if member not in gone)
                if not gone:
                    raise
                reports = self._agree(store, number, living, Progress(ticket=ticket, phase=phase))
                if self.rank in resolve(reports) and part is not None:
                    total, ticket = total + part, ticket + 1
                self._note("agreed")
                number, members = number + 1, living
        expected = float(sum(_value(t, r) for t in range(ticket) for r in range(_SAMPLES)))
        return {
            "ticket": ticket,
            "is_exact": bool((total == expected).all()),
            "members": list(members),
            "lost": lost,
            "told": self.told,
            "threads": len(os.listdir("/proc/self/task")),
        }

    def _form(self, former: Former, number: int, members: tuple[int, ...]) -> Generation:
        with _struck_while_forming(
            self._strike(number, Moment.ARRIVED), self._strike(number, Moment.CONNECTING)
        ):
            return former.form(
                Members(
                    self._store(),
                    f"generation-{number}",
                    self.rank,
                    members,
                    is_aborted=lambda: bool(self.dead & set(members)),
                    limits=WaitLimits(tick_s=0.02, timeout_s=self.job.timeout_s, arrive_s=60.0),
                )
            )

    def _part(self, generation: Generation, number: int, ticket: int) -> torch.Tensor:
        """This step's sum over all samples, which are spread over the members."""
        groups = generation.groups
        for turn in range(2):
            is_struck = turn == 1 and self._strike(number, Moment.ALL_TO_ALL)
            exchange_uneven(groups.exchange, self.job.rows, is_struck or None)
        members = groups.exchange.ranks
        if len(members) > 1:
            every = SubGroup(groups.exchange, members)
            exchange_uneven(every, self.job.rows, self._strike(number, Moment.MESSAGES))
        mine = range(members.index(self.rank), _SAMPLES, len(members))
        value = float(sum(_value(ticket, sample) for sample in mine))
        part = torch.full((self.job.floats,), value, dtype=torch.float64)
        pending = groups.gradients.all_reduce(part)
        if strike := self._strike(number, Moment.ALL_REDUCE):
            strike()
        pending.wait()
        return part

    def _strike(self, number: int, moment: Moment) -> Callable[[], None] | None:
        for strike in self.job.strikes:
            is_now = (strike.generation, strike.moment) == (number, moment)
            if is_now and self.rank in strike.victims:
                return self._be_struck
        return None

    def _be_struck(self) -> None:
        self._store().append("struck", f"{self.rank}@{time.monotonic()},")  # type: ignore[attr-defined]
        os.kill(os.getpid(), signal.Signals[self.job.signal])

    def _listen(self) -> None:
        """Hear from the supervisor who is dead: leaves from this thread."""
        store, number = self._store(), 0
        while True:
            store.wait([f"gone/{number}"], timedelta(hours=1))
            self.dead.add(int(store.get(f"gone/{number}")))
            number += 1
            generation = self.generation
            if generation is not None and self.dead & set(generation.groups.control.ranks):
                generation.abort()

    def _agree(
        self, store: TCPStore, number: int, living: tuple[int, ...], own: Progress
    ) -> dict[int, Progress]:
        store.set(f"report/{number}/{self.rank}", f"{own.ticket} {int(own.phase)}")
        keys = [f"report/{number}/{rank}" for rank in living]
        store.wait(keys, timedelta(seconds=60))
        told = {r: store.get(key).decode().split() for r, key in zip(living, keys, strict=True)}
        return {r: Progress(ticket=int(t), phase=Phase(int(p))) for r, (t, p) in told.items()}

    def _store(self) -> TCPStore:
        return TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)

    def _note(self, event: str) -> None:
        self.told.setdefault(event, []).append(time.monotonic())


_SAMPLES = 24


def _value(ticket: int, sample: int) -> int:
    return (ticket * 31 + sample) % 97


def exchange_uneven(group: Group, rows: int, strike: Callable[[], None] | None = None) -> None:
    """Member i sends i * rows rows to each but the last one, which gets none; values say whose."""
    members, own = group.ranks, group.ranks.index(group.rank)
    last = len(members) - 1
    send = [own * rows if other != last else 0 for other in range(len(members))]
    receive = [other * rows if own != last else 0 for other in range(len(members))]
    output = torch.full((sum(receive), 256), -1.0)
    pending: Pending = group.all_to_all_rows(
        output, torch.full((sum(send), 256), float(group.rank)), receive, send
    )
    if strike:
        strike()
    pending.wait()
    for member, part in zip(members, output.split(receive), strict=True):
        assert bool((part == member).all()), "rows arrive in the order of ranks"


@contextlib.contextmanager
def _struck_while_forming(
    after_meeting: Callable[[], None] | None, before_second: Callable[[], None] | None
) -> Iterator[None]:
    """Be struck where the generation that forms inside comes to that."""
    meet, connect = Members.meet, Members.connect

    def meeting(members: Members) -> None:
        meet(members)
        if after_meeting is not None:
            after_meeting()

    def connecting(members: Members, connector: Connector, name: str, *rest: Any) -> Group:
        if before_second is not None and name == "gradients":
            before_second()
        return connect(members, connector, name, *rest)

    with mock.patch.multiple(Members, meet=meeting, connect=connecting):
        yield


def _rank_main(rank: int, job: Job, port: int, result: Pipe) -> None:
    end_with_parent()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    result.send(Survivor(rank=rank, job=job, port=port).run())
    result.close()
    time.sleep(0.5)  # the last generation is left by nobody
    os._exit(0)


def run_job(job: Job, context: BaseContext | None = None) -> dict[int, dict[str, Any]]:
    """Run the ranks; what survivors saw, by rank, with `struck`: when victims were struck."""
    context = context or multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = {rank: context.Pipe(duplex=False) for rank in range(job.ranks)}
    processes = [
        context.Process(target=_rank_main, args=(rank, job, store.port, pipes[rank][1]))  # type: ignore[attr-defined]
        for rank in range(job.ranks)
    ]
    for process in processes:
        process.start()
    for _, ours in pipes.values():
        ours.close()
    victims = {victim for strike in job.strikes for victim in strike.victims}
    found: dict[int, dict[str, Any]] = {}
    struck: dict[int, float] = {}
    told: list[int] = []
    try:
        give_up_s = time.monotonic() + 120.0
        while len(found) < job.ranks - len(victims):
            if time.monotonic() > give_up_s:
                raise RuntimeError(f"ranks {sorted(set(pipes) - set(found) - victims)} hang")
            if store.check(["struck"]):
                pairs = store.get("struck").decode().rstrip(",").split(",")
                struck = {int(r): float(at) for r, at in (pair.split("@") for pair in pairs)}
            for rank, at_s in struck.items():
                is_dead = not processes[rank].is_alive()
                is_known = is_dead or time.monotonic() - at_s > SILENCE_S
                if is_known and job.is_told and rank not in told:
                    store.set(f"gone/{len(told)}", str(rank))
                    told.append(rank)
            for rank, (theirs, _) in pipes.items():
                if rank not in found and rank not in victims and theirs.poll():
                    found[rank] = theirs.recv() | {"struck": struck}
            time.sleep(0.002)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found


def recovery_ms(way: str, number: str, moment: Moment) -> dict[str, float]:
    """Milliseconds from the signal until the slowest survivor has left, formed and redone."""
    strike = Strike(generation=0, victims=(3,), moment=moment)
    found = run_job(Job(way=way, strikes=(strike,), signal=number, steps_after=1, rows=1024))
    assert all(one["is_exact"] for one in found.values())
    struck_s = next(iter(found.values()))["struck"][3]
    return {
        name: 1e3 * (max(one["told"][event][-1] for one in found.values()) - struck_s)
        for name, event in {"left": "left", "formed": "formed", "redone": "step"}.items()
    }


def _abandon(rank: int, way: str, port: int, count: int, result: Pipe) -> None:
    """Leave `count` generations in the middle of an all-to-all whose last member has stopped."""
    end_with_parent()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    former = Former(connectors()[way](), connectors()[way]())
    limits = WaitLimits(tick_s=0.02, timeout_s=2.0, arrive_s=60.0)
    rows, seen = torch.ones(3 * 2048, 512), [_resources()]
    for number in range(count):
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        members = Members(
            store, f"{number}", rank, (0, 1, 2), is_aborted=lambda: False, limits=limits
        )
        try:
            generation = former.form(members)
        except PeerLost:  # the others had formed it, and have left it
            seen.append(_resources())
            continue
        output = torch.empty_like(rows)
        pending = generation.groups.exchange.all_to_all_rows(output, rows, [2048] * 3, [2048] * 3)
        if rank != 2:
            threading.Timer(0.02, generation.abort).start()
            with contextlib.suppress(PeerLost):
                pending.wait()
        else:
            time.sleep(0.05)
        generation.abort()
        seen.append(_resources())
    time.sleep(2.0 * limits.timeout_s + 3.0)
    ctypes.CDLL(None).malloc_trim(0)  # what is free, and only kept by the allocator
    result.send([*seen, _resources()])
    os._exit(0)


def _resources() -> tuple[int, int, int]:
    """Threads, open files and resident kilobytes of this process."""
    status = Path("/proc/self/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    tasks, files = os.listdir("/proc/self/task"), os.listdir("/proc/self/fd")
    return len(tasks), len(files), int(resident.split()[1])


def abandoned(
    way: str, count: int, context: BaseContext | None = None
) -> list[tuple[int, int, int]]:
    """Resources of a rank before, after each of so many generations, and when all is over."""
    context = context or multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(3)]
    processes = [
        context.Process(target=_abandon, args=(rank, way, store.port, count, pipes[rank][1]))  # type: ignore[attr-defined]
        for rank in range(3)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()  # a rank that fails ends the wait for its result
    found: list[tuple[int, int, int]] = pipes[0][0].recv()
    for process in processes:
        process.join()
    return found


def _overhead(rank: int, way: str, folder: str, port: int, rounds: int, result: Pipe) -> None:
    """Times of a small exchange by an elastic group and by torch's own calls, in turn."""
    end_with_parent()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    limits = WaitLimits(tick_s=0.1, timeout_s=60.0)
    former = Former(connectors()[way](), connectors()[way]())
    generation = former.form(
        Members(store, "g", rank, (0, 1), is_aborted=lambda: False, limits=limits)
    )
    groups: dict[str, Group] = {"torch": TorchGroup(), "elastic": generation.groups.exchange}
    rows, output = torch.ones(8, 64), torch.empty(8, 64)
    spent: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(rounds):
        for name, group in groups.items():
            began_s = time.perf_counter()
            for _ in range(20):
                group.all_to_all_rows(output, rows, [4, 4], [4, 4]).wait()
            spent[name].append(time.perf_counter() - began_s)
    result.send({name: statistics.median(times) / 20 for name, times in spent.items()})
    os._exit(0)


def overhead(way: str, rounds: int) -> dict[str, float]:
    """Microseconds of a small exchange between two ranks, and the ratio."""
    context = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        given = (folder, store.port, rounds)
        processes = [
            context.Process(target=_overhead, args=(rank, way, *given, pipes[rank][1]))
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        found = pipes[0][0].recv()
        for process in processes:
            process.join()
    return {
        "elastic_us": 1e6 * found["elastic"],
        "torch_us": 1e6 * found["torch"],
        "ratio": found["elastic"] / found["torch"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="../shared/data", help="not used: all data is made here")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--generations", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=200, help="of the small exchanges")
    options = parser.parse_args()
    found: dict[str, Any] = {"torch": torch.__version__}
    table = Table("groups", "signal", "in", "left ms", "formed ms", "redone ms")
    for way in connectors():
        found[way] = {}
        for number in ("SIGKILL", "SIGSTOP"):
            for moment in (Moment.ALL_TO_ALL, Moment.ALL_REDUCE, Moment.MESSAGES):
                runs = [recovery_ms(way, number, moment) for _ in range(options.repeats)]
                medians = {k: round(statistics.median(run[k] for run in runs)) for k in runs[0]}
                table.add_row(way, number, moment, *map(str, medians.values()))
                found[way][f"{number} {moment}"] = medians
        before, *during, after = abandoned(way, options.generations)
        most = [max(column) for column in zip(*during, strict=True)]
        found[way]["abandoned"] = {
            "before": list(before),
            "most": most,
            "after": list(after),
        }
        found[way]["overhead"] = {k: round(v, 2) for k, v in overhead(way, options.rounds).items()}
    console = Console(width=100)
    console.print(table)
    for way in connectors():
        console.print(
            f"{way}: threads, files, kB after {options.generations} abandoned generations: "
            f"{found[way]['abandoned']}; small exchange: {found[way]['overhead']}"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
