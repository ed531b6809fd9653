"""What ranks do in tests of the fabric: each a process of its own, which returns what it saw."""

import json
import multiprocessing
import operator
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from pacekeeper.trainer.distributed import process_group as fabric_module
from pacekeeper.trainer.distributed.kv_store import Stores, host_store
from pacekeeper.trainer.distributed.process_group import InterruptibleProcessGroup
from pacekeeper.trainer.groups.elastic import Members
from pacekeeper.trainer.groups.group import PeerLost
from support.fork_server import server_context
from support.sabotage import wrap

TIMEOUT_S = 90.0
JUDGED = 8  # whose resources are compared with those of the second group
Body = Callable[[Path, int, tuple[int, ...]], dict[str, Any]]


def run_ranks(
    body: Body, directory: Path, ranks: tuple[int, ...] = (0, 2, 5)
) -> dict[int, dict[str, Any]]:
    """What `body(directory, rank, ranks)` returned on each rank; killed ranks are left out."""
    context = server_context()
    processes = [context.Process(target=_main, args=(body, directory, r, ranks)) for r in ranks]
    for process in processes:
        process.start()
    give_up_s = time.monotonic() + TIMEOUT_S
    for process in processes:
        process.join(max(0.0, give_up_s - time.monotonic()))
        process.kill()
        process.join()
    codes = [process.exitcode for process in processes]
    assert set(codes) <= {0, -signal.SIGKILL}, codes
    files = {rank: directory / f"result-{rank}.json" for rank in ranks}
    return {rank: json.loads(p.read_text()) for rank, p in files.items() if p.exists()}


def _main(body: Body, directory: Path, rank: int, ranks: tuple[int, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    result = body(directory, rank, ranks)
    (directory / f"result-{rank}.json").write_text(json.dumps(result))


def form(
    directory: Path, generation: int, rank: int, ranks: tuple[int, ...], **options: Any
) -> InterruptibleProcessGroup:
    """A fabric whose store is a file."""
    values: dict[str, Any] = {"is_aborted": lambda: False, "tick_s": 0.02, "timeout_s": 60.0}
    return InterruptibleProcessGroup(
        store=FileStore(str(directory / f"store-{generation}"), len(ranks)),
        generation=generation,
        rank=rank,
        ranks=ranks,
        **(values | options),
    )


class Notes:
    """A clock that writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin(self) -> None:
        self.calls.append("begin")

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def end(self) -> None:
        self.calls.append("end")


def exchange_uneven(directory: Path, rank: int, ranks: tuple[int, ...]) -> dict[str, Any]:
    """Member i sends i rows to all but the last one, who gets none; values name the sender."""
    clock = Notes()
    fabric = form(directory, 1, rank, ranks, clock=clock)
    position, size = ranks.index(rank), len(ranks)
    sent = [0 if j == size - 1 else position for j in range(size)]
    got = [0 if position == size - 1 else j for j in range(size)]
    output = torch.empty(sum(got), 2)
    fabric.all_to_all(output, torch.full((sum(sent), 2), float(rank)), got, sent)
    votes = fabric.exchange([rank, 0.5])
    fabric.exchange([1.0])
    fabric.close()
    return {"rows": output.tolist(), "votes": votes.tolist(), "calls": clock.calls}


def lose_a_peer(directory: Path, rank: int, ranks: tuple[int, ...]) -> dict[str, Any]:
    """The highest rank breaks off in mid-collective: again and again, at last by SIGKILL.

    It keeps a reference to each group, as forgotten tracebacks do: the others must notice anyway.
    """
    fabric = form(directory, 1, rank, ranks)
    resources, kept, last = list[tuple[int, int]](), [], 12
    for generation in range(2, last + 1):
        try:
            if rank in ranks[-2:]:  # a part of the group ends with it, whoever waits in it
                part = fabric.group(ranks[-2:])
                assert part.exchange([rank]).tolist() == [[float(r)] for r in ranks[-2:]]
                assert fabric.group(ranks[-2:]) is part
            fabric.exchange([1.0])
            if rank == ranks[-1] and generation == last:
                os.kill(os.getpid(), signal.SIGKILL)
            while rank != ranks[-1]:
                (part if rank == ranks[-2] and generation % 2 else fabric).exchange([1.0])
            kept.append(fabric._group)
        except PeerLost as error:
            assert not error.is_silence
        fabric.close()
        members = ranks if generation < last else ranks[:-1]
        fabric = form(directory, generation, rank, members)
        resources.append(_resources(resources[1] if len(resources) == JUDGED else (0, 0)))
    votes = fabric.exchange([rank])
    fabric.exchange([1.0])
    fabric.close()
    return {"votes": votes.tolist(), "resources": resources}


def wait_for_nobody(directory: Path, rank: int, ranks: tuple[int, ...]) -> dict[str, Any]:
    """The first rank stays away, first from collectives, then from the group itself.

    The others wait: until the flag says that it is dead, then until their time is up.
    """
    flag = directory / "dead"
    patient: dict[str, Any] = {"is_aborted": flag.exists}
    hasty: dict[str, Any] = {"timeout_s": 0.3}
    seen: dict[str, Any] = {}
    for generation, options in ((1, patient), (2, hasty), (3, patient), (4, hasty)):
        if rank == ranks[0]:
            fabric = form(directory, generation, rank, ranks) if generation <= 2 else None
            if fabric is not None:
                _await(partial(_have, "formed", directory, generation, len(ranks) - 1))
            if options is patient:
                time.sleep(0.1)
                flag.touch()
            _await(partial(_have, "left", directory, generation, len(ranks) - 1))
            flag.unlink(missing_ok=True)
            (directory / f"next-{generation}").touch()
            if fabric is not None:
                fabric.close()
            continue
        fabric = None
        try:
            if generation == 2:  # all come, however late
                fabric = form(directory, generation, rank, ranks)
                members = fabric._members
                members.limits = replace(members.limits, timeout_s=hasty["timeout_s"])
            else:
                fabric = form(directory, generation, rank, ranks, **options)
            (directory / f"formed-{generation}-{rank}").touch()
            fabric.exchange([1.0])
        except PeerLost as error:
            seen[str(generation)] = [fabric is not None, error.is_silence]
        (directory / f"left-{generation}-{rank}").touch()
        _await((directory / f"next-{generation}").exists)
        if fabric is not None:
            fabric.close()
    return seen


def leave_while_connecting(
    directory: Path, rank: int, ranks: tuple[int, ...], *, is_told: bool
) -> dict[str, Any]:
    """The last rank dies when all have come: before it has told its address, or after."""
    fabric_module.FORM_TIMEOUT_S = 10 * TIMEOUT_S
    dead, pid = directory / "dead", directory / "pid"

    def die() -> None:
        dead.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def is_gone() -> bool:
        """With its threads: one of them may connect a moment longer."""
        return dead.exists() and not Path(f"/proc/{pid.read_text()}").exists()

    def strike() -> None:
        if rank == ranks[-1] and is_told:
            threading.Timer(0.2, die).start()
        elif rank == ranks[-1]:
            die()
        else:
            _await(is_gone)

    if rank == ranks[-1]:
        pid.write_text(str(os.getpid()))
    wrap(Members, "meet", after=lambda f: strike() if f.name == "1" else None)
    why = ""
    try:
        form(directory, 1, rank, ranks, is_aborted=dead.exists, timeout_s=10 * TIMEOUT_S)
    except PeerLost as error:
        assert not error.is_silence
        why = str(error)
    fabric = form(directory, 2, rank, ranks[:-1])
    votes = fabric.exchange([rank])
    fabric.exchange([1.0])
    fabric.close()
    return {"why": why, "votes": votes.tolist()}


def fail_alone(directory: Path, rank: int, ranks: tuple[int, ...]) -> dict[str, Any]:
    """The first rank tries to connect to one that came and died; then it meets the others."""
    lost = 0
    if rank == ranks[0]:
        store = FileStore(str(directory / "store-1"), 2)
        store.add("group-1/arrived", 1)
        try:
            form(directory, 1, rank, (rank, 99), timeout_s=0.5)
        except PeerLost:
            lost = 1
    fabric = form(directory, 2, rank, ranks, timeout_s=TIMEOUT_S / 3)
    votes = fabric.exchange([lost])
    fabric.exchange([1.0])
    fabric.close()
    return {"votes": votes.tolist()}


def _host(tells: Connection) -> None:
    server = host_store("127.0.0.1", 0)
    tells.send(server.port)
    time.sleep(600.0)


def outlive_a_frozen_store(
    directory: Path, rank: int, ranks: tuple[int, ...], *, is_late: bool
) -> dict[str, Any]:
    """The host of the store is stopped while a group of two forms: before all came, or after."""
    fabric_module.STORE_TIMEOUT_S = fabric_module.FORM_TIMEOUT_S = 0.5
    told, tells = multiprocessing.Pipe(duplex=False)
    host = multiprocessing.get_context("fork").Process(target=_host, args=(tells,))
    host.start()
    try:
        stores = Stores((f"127.0.0.1:{told.recv()}",))
        store = stores.dedicated_client(0)
        assert store is not None and stores.client(0) is not None
        stores.answer_s = 0.5
        freeze = partial(os.kill, host.pid or 0, signal.SIGSTOP)
        if is_late:
            store.add("group-1/arrived", 1)  # the other one is here
            wrap(Members, "meet", after=lambda _: freeze())
        else:
            freeze()
        try:
            InterruptibleProcessGroup(
                store=store,
                generation=1,
                rank=rank,
                ranks=ranks + (rank + 1,),
                is_aborted=lambda: False,
                tick_s=0.02,
                timeout_s=TIMEOUT_S,
            )
        except PeerLost as error:
            return {"is_silence": error.is_silence, "answer": stores.read(0, "key"),
                    "gone": sorted(stores.gone)}  # fmt: skip
        return {}
    finally:
        host.kill()
        host.join()


def _resources(usual: tuple[int, int]) -> tuple[int, int]:
    """Descriptors and threads: the least of a moment, longer where they are more than usual, for
    the kernel may show a thread that has ended for a while.
    """
    seen, began_s = [], time.monotonic()
    while True:
        seen.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
        least = min(fds for fds, _ in seen), min(threads for _, threads in seen)
        is_usual = all(map(operator.le, least, usual))
        if time.monotonic() > began_s + (0.04 if is_usual or not any(usual) else 5.0):
            return least
        time.sleep(0.002)


def _have(done: str, directory: Path, generation: int, count: int) -> bool:
    return len(list(directory.glob(f"{done}-{generation}-*"))) == count


def _await(is_so: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < give_up_s
        time.sleep(0.005)


class _Tardy:
    """A collective that ends in the very moment in which the wait for it gives up."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work
        self._is_late = False

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: timedelta) -> bool:
        if self._is_late:
            return self._work.wait(timeout)
        self._is_late = True
        _await(self._work.is_completed)
        raise RuntimeError("Operation timed out!")


def end_with_the_tick(directory: Path, rank: int, ranks: tuple[int, ...]) -> dict[str, Any]:
    """Each exchange is complete just after its first tick was over; at last the peer breaks off."""
    fabric = form(directory, 1, rank, ranks)
    await_host = Members.await_host
    patched: Any = Members
    patched.await_host = lambda members, work: await_host(members, cast(dist.Work, _Tardy(work)))
    votes = fabric.exchange([rank])
    fabric.exchange([1.0])
    if rank == ranks[0]:
        fabric.close()
        return {"votes": votes.tolist(), "is_lost": None}
    try:
        while True:
            fabric.exchange([1.0])
    except PeerLost as error:
        return {"votes": votes.tolist(), "is_lost": not error.is_silence}
