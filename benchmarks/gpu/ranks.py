"""Several ranks: on one device by gloo, on a device each by NCCL, and jobs of `launch`."""

import json
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore

from benchmarks.gpu.common import (
    NotRun,
    Scale,
    Size,
    figure,
    micro_batch,
    require,
    synchronize,
    wall_s,
)
from benchmarks.gpu.models import add_adamw, engine_of, meet, use_loopback
from benchmarks.rank_processes import run_processes
from pacekeeper.core.layout.layout import ExpertReplica, Layout
from pacekeeper.trainer.groups.elastic import Connector, ElasticGroup, Members
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.groups.gloo import GlooConnector
from pacekeeper.trainer.groups.reconfiguring import ReconfiguringConnector, can_reconfigure
from pacekeeper.trainer.groups.waiting import WaitLimits
from pacekeeper.trainer.parallel.layouts import start_layout
from pacekeeper.trainer.parallel.replica_check import compare_replicas

MOST_APART = 1e-2  # of losses in bfloat16 with sums in another order
MOST_RANKS = 4
STEPS = 6  # before the move, and as many after it


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Figures of `share_device` and `use_nccl`."""

    ranks: int = figure("ranks")
    backend: str = figure("backend of tensors on the device")
    loss_apart: float = figure("largest relative difference of a loss to that of one rank")
    moved_bytes: int = figure("bytes sent in a move to random replicas and shares")
    move_s: float = figure("seconds of the move")
    are_replicas_equal: bool = figure("all replicas equal bit by bit after the last step")
    step_s: float = figure("seconds of a step, median")


def share_device(device: torch.device, scale: Scale) -> Ranks:
    """Train on two ranks that share one device, their messages by gloo, and on one rank.

    A check of the code on the device, not a way to train: torch stages these messages in host
    memory.
    """
    backend = "cpu:gloo,cuda:gloo" if device.type == "cuda" else "gloo"
    return _compare(scale.small, 2, backend, str(device), is_own=False)


def use_nccl(device: torch.device, scale: Scale) -> Ranks:
    """Train on ranks with a device each by NCCL, with a move, and on one rank."""
    if device.type == "cpu":
        return _compare(scale.small, 2, "gloo", "cpu", is_own=False)
    count = min(torch.cuda.device_count(), MOST_RANKS)
    return _compare(scale.small, count, "cpu:gloo,cuda:nccl", "cuda", is_own=True)


def _compare(size: Size, count: int, backend: str, device: str, *, is_own: bool) -> Ranks:
    with tempfile.TemporaryDirectory() as folder:
        run_processes(_rank_main, count, size, count, backend, device, is_own, folder)
        alone, found = json.loads(Path(folder, "found.json").read_text())
    pairs = zip(found.pop("losses"), alone["losses"], strict=True)
    apart = max(abs(own / one - 1.0) for own, one in pairs)
    require(found["are_replicas_equal"], "replicas of an expert or of a dense block differ")
    require(apart < MOST_APART, f"losses differ by {apart:.3g} from those of one rank")
    on_device = backend.rpartition(":")[2]
    return Ranks(ranks=count, backend=on_device, loss_apart=apart, **found)


def _rank_main(
    rank: int, size: Size, count: int, backend: str, device: str, is_own: bool, folder: str
) -> None:
    """One rank; the lowest trains alone first, and writes what it found."""
    own = torch.device(device, rank) if is_own else torch.device(device)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    else:
        torch.set_num_threads(1)
    alone = {} if rank else _train(size, own, EngineGroups.single_process())
    meet(backend, folder, rank, count)
    found = _train(size, own, EngineGroups.from_torch(own))
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps([alone, found]))
    dist.barrier()
    dist.destroy_process_group()


def _train(size: Size, device: torch.device, groups: EngineGroups) -> dict[str, Any]:
    layout = start_layout([size.experts] * size.layers, groups.exchange.ranks)
    engine = engine_of(size, device, groups=groups, layout=layout, num_slots=size.experts)
    add_adamw(engine, 1e-4)
    losses: list[float] = []

    def step() -> None:
        batch = micro_batch(size, len(losses), rows=max(size.rows, len(layout.ranks)))
        places = engine.rows(len(batch["input_ids"]))
        own = {name: t[places.start : places.stop] for name, t in batch.items()}
        losses.append(engine.step([own] if len(places) else []).loss.item())

    spent = [wall_s(device, step) for _ in range(STEPS)]
    sent: list[int] = []
    changed = random_layout(layout, Random(3))
    move_s = wall_s(device, lambda: sent.append(engine.apply(changed).moved_bytes))
    spent += [wall_s(device, step) for _ in range(STEPS)]
    differences = compare_replicas(engine.states, engine.layout, groups.control)
    return {
        "losses": losses,
        "moved_bytes": sent[0],
        "move_s": move_s,
        "are_replicas_equal": not differences,
        "step_s": sorted(spent)[len(spent) // 2],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Generations:
    """Figures of `reconfigure`."""

    generations: int = figure("generations of a group of one rank, formed, used and left in turn")
    first_ms: float = figure("milliseconds to connect the first")
    later_ms: float = figure("milliseconds to connect a later one, median")
    leave_ms: float = figure("milliseconds to interrupt one, median")
    are_sums_right: bool = figure("collectives gave the right results in each")


def reconfigure(device: torch.device, scale: Scale) -> Generations:
    """Form and leave groups as elastic jobs do on the device, of the one rank that there is."""
    if device.type == "cuda" and not can_reconfigure(device):
        raise NotRun(f"needs torch 2.15 or later, this is {torch.__version__}")
    use_loopback()
    connector: Connector = GlooConnector()
    if device.type == "cuda":
        connector = ReconfiguringConnector(device)
    limits = WaitLimits(tick_s=0.05, timeout_s=20.0)
    connected, left, are_right = [], [], True
    for number in range(scale.steps):
        store = PrefixStore(str(number), HashStore())
        members = Members(store, str(number), 0, (0,), is_aborted=lambda: False, limits=limits)
        began_s = time.perf_counter()
        connection = connector.connect(store, 0, 1, limits)
        connected.append(time.perf_counter() - began_s)
        group = ElasticGroup(members, connection, (0,))
        values = torch.arange(1000.0, device=device)
        arrived = torch.empty_like(values)
        group.all_to_all_rows(arrived, values, [1000], [1000]).wait()
        group.all_reduce(arrived).wait()
        gathered = group.all_gather(arrived)
        are_right = are_right and bool(torch.equal(gathered, values[None]))
        synchronize(device)
        began_s = time.perf_counter()
        connection.interrupt()
        left.append(time.perf_counter() - began_s)
        connection.retire(is_idle=True)
    require(are_right, "a collective gave a wrong result")
    return Generations(
        generations=len(connected),
        first_ms=connected[0] * 1e3,
        later_ms=statistics.median(connected[1:]) * 1e3,
        leave_ms=statistics.median(left) * 1e3,
        are_sums_right=are_right,
    )


def random_layout(layout: Layout, chosen: Random, least: int = 1) -> Layout:
    """Return the next generation: any replicas, at least so many, with any shares."""

    def replicas() -> tuple[ExpertReplica, ...]:
        ranks = sorted(chosen.sample(layout.ranks, chosen.randint(least, len(layout.ranks))))
        weights = [0.1 + chosen.random() for _ in ranks]
        return tuple(
            ExpertReplica(rank, weight / sum(weights))
            for rank, weight in zip(ranks, weights, strict=True)
        )

    return replace(
        layout,
        generation=layout.generation + 1,
        experts=tuple(tuple(replicas() for _ in placed) for placed in layout.experts),
    )
