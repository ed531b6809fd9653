"""A rank that trains and saves in each way, and a peer that keeps its snapshots."""

import multiprocessing
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from benchmarks.rank_processes import end_with_parent
from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.trainer.checkpoint.async_writer import SaveResult, SaveStatus
from pacekeeper.trainer.checkpoint.in_memory import Snapshots
from pacekeeper.trainer.checkpoint.manager import Checkpoints, Position
from pacekeeper.trainer.checkpoint.staging import HostCopies
from pacekeeper.trainer.engine.engine import Engine
from pacekeeper.trainer.engine.job import batch_of, engine_options, make_optimizer, prepare_job
from pacekeeper.trainer.groups.checked_payload import exchange_values
from pacekeeper.trainer.groups.group import Group, TorchGroup
from pacekeeper.trainer.parallel.layouts import start_layout

WARM_STEPS = 3
MODES = ("none", "blocking", "beside")


@dataclass(kw_only=True)
class Times:
    """Seconds, by what followed the step. `next_s`: the steps after it."""

    held_s: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    held_cpu_s: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    next_s: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    size_bytes: list[int] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        return median(self.next_s["none"])

    def held(self, mode: str) -> float:
        """Beyond what looking whether one is due takes, as a fraction of a step."""
        return (median(self.held_s[mode]) - median(self.held_s["none"])) / self.step_s

    @property
    def busy(self) -> float:
        """The same of the processor time in it: what a host with other work to do does not blur."""
        beside, none = self.held_cpu_s["beside"], self.held_cpu_s["none"]
        return (median(beside) - median(none)) / self.step_s

    def slowed(self, mode: str) -> float:
        """What the step after it takes longer, as a fraction of a step."""
        return median(self.next_s[mode]) / self.step_s - 1.0


class LoneRank:
    """One rank that holds the whole model and trains it alone."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        job = prepare_job(config, (0,))
        self.layout, self._sampler = job.layout, job.sampler
        self.engine = Engine(
            job.skeleton,
            job.source,
            layout=job.layout,
            options=engine_options(config, job, torch.device("cpu")),
        )
        self.engine.add_optimizer(make_optimizer(config, self.engine))
        self.checkpoints = Checkpoints(
            config,
            rank=0,
            run_id=1,
            first_run_id=1,
            identity=self.engine.fingerprint(data=job.data[0]),
            states=self.engine.states,
        )

    @property
    def step(self) -> int:
        return self.engine.num_steps

    def train(self) -> float:
        """One step; seconds it took."""
        began_s = time.perf_counter()
        config = self.config
        rows = self.engine.micro_batches(config.rows_per_step, config.rows_per_microbatch)
        result = self.engine.step(batch_of(self.config, self._sampler, self.step, rows))
        routed = {layer: tokens.tolist() for layer, tokens in result.routed.items()}
        self.checkpoints.partial.count(routed)
        return time.perf_counter() - began_s

    def save(self, mode: str, times: Times) -> None:
        """What follows a step, as the training loop does it; `blocking` waits for the end."""
        word = self.checkpoints.own_vote(self.step, self.layout)  # travels in the vote
        self.checkpoints.receive_votes([word])
        at = Position(layout=self.layout, step=self.step, ticket=self.step, last_loss=0.0)
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        if mode == "none":
            self.checkpoints.save_if_due(at, is_storing=True)  # is left out, and says so
        else:
            self.checkpoints.save_if_due(at, is_storing=False)
        if mode == "blocking":
            self.checkpoints.close()
        times.held_s[mode].append(time.perf_counter() - began_s)
        times.held_cpu_s[mode].append(time.thread_time() - began_cpu_s)


def run(config: EngineConfig, rounds: int) -> tuple[Times, LoneRank]:
    """All kinds in turn, `rounds` times each."""
    torch.set_num_threads(1)
    rank, times = LoneRank(config), Times()
    for _ in range(WARM_STEPS):
        rank.train()
    rank.save("blocking", Times())  # the first writes everything, whatever the settings
    for _ in range(rounds):
        for mode in MODES:
            rank.train()
            rank.save(mode, times)
            times.next_s[mode].append(rank.train())
            news = rank.checkpoints.close()  # the next kind finds the disk at rest
            times.size_bytes += [one.size_bytes for one in news if one.size_bytes]
    return times, rank


@dataclass(kw_only=True)
class CopyTimes:
    """Of one kind of copies: seconds that each held training, of the step after it and of steps
    that nothing disturbs; `arrive_s`: until the whole was where it is kept.
    """

    held_s: list[float] = field(default_factory=list)
    next_s: list[float] = field(default_factory=list)
    none_s: list[float] = field(default_factory=list)
    arrive_s: list[float] = field(default_factory=list)
    size_bytes: list[int] = field(default_factory=list)

    @property
    def held(self) -> float:
        """By one copy, as a fraction of a step."""
        return median(self.held_s) / median(self.none_s)

    @property
    def slowed(self) -> float:
        """What the step after it takes longer, as a fraction of a step."""
        return median(self.next_s) / median(self.none_s) - 1.0


def run_windows(config: EngineConfig, rounds: int) -> tuple[list[CopyTimes], LoneRank]:
    """Of each step of a window, in `rounds` of them, each written before the next begins."""
    torch.set_num_threads(1)
    rank = LoneRank(config)
    found = [CopyTimes() for _ in range(config.checkpoint_window_steps)]
    for _ in range(WARM_STEPS):
        rank.train()
    for is_counted in [False] + [True] * rounds:
        times = found if is_counted else [CopyTimes() for _ in found]
        rank.train()
        began_s = time.perf_counter()
        for turn in times:
            held = Times()
            rank.save("beside", held)
            turn.held_s += held.held_s["beside"]
            turn.next_s.append(rank.train())
        news = rank.checkpoints.close()
        times[-1].arrive_s.append(time.perf_counter() - began_s)
        times[-1].size_bytes += [one.size_bytes for one in news if one.size_bytes]
        for turn in times:
            turn.none_s.append(rank.train())
    return found, rank


PAIR = (0, 1)
NODES = {0: 0, 1: 1}


def run_snapshots(config: EngineConfig, rounds: int) -> CopyTimes:
    """Of one of two ranks that have the same state and each keep half of it for the other; the
    other one, a process of its own, only keeps.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        arguments = (directory, config, rounds)
        other = multiprocessing.get_context("spawn").Process(target=_keep, args=arguments)
        other.start()
        try:
            rank, found = LoneRank(config), CopyTimes()
            pair, told = _pair(0, directory, rank)
            for _ in range(WARM_STEPS):
                rank.train()
            for is_counted in [False] + [True] * rounds:
                times = found if is_counted else CopyTimes()
                rank.train()
                began_s = time.perf_counter()
                pair.begin(rank)
                times.held_s.append(time.perf_counter() - began_s)
                times.next_s.append(rank.train())
                pair.snapshots.wait()
                (one,) = told
                told.clear()
                assert one.outcome is SaveStatus.COMPLETE, one
                times.arrive_s.append(one.took_s)
                times.size_bytes.append(one.size_bytes)
                times.none_s.append(rank.train())
            pair.close()
        finally:
            other.join(10.0)
            other.kill()
    return found


@dataclass(kw_only=True)
class Pair:
    """One of the two."""

    group: Group
    snapshots: Snapshots

    def begin(self, rank: LoneRank) -> None:
        """A snapshot of now."""
        layout = start_layout(rank.engine.states.num_experts, PAIR, len(PAIR), NODES)
        self.snapshots.begin(
            layout,
            rank.step,
            last_loss=0.0,
            account=rank.checkpoints.partial.account,
            new_group=lambda: self.group,
            domain_of=NODES,
        )

    def close(self) -> None:
        """When both have come to their end."""
        exchange_values([1.0], self.group)
        dist.destroy_process_group()


def _pair(number: int, directory: str, rank: LoneRank) -> tuple[Pair, list[SaveResult]]:
    told: list[SaveResult] = []
    store = FileStore(str(Path(directory, "store")), len(PAIR))
    dist.init_process_group("gloo", store=store, rank=number, world_size=len(PAIR))
    snapshots = Snapshots(
        rank=number, run_id=1, states=rank.engine.states, copies=HostCopies(), note=told.append
    )
    return Pair(group=TorchGroup(), snapshots=snapshots), told


def _keep(directory: str, config: EngineConfig, rounds: int) -> None:
    """The body of the other's process."""
    end_with_parent()
    torch.set_num_threads(1)
    rank = LoneRank(config)
    rank.train()
    pair, _ = _pair(1, directory, rank)
    for _ in range(1 + rounds):
        pair.begin(rank)
        pair.snapshots.wait()
    pair.close()
