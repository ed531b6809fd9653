"""A rank that trains the demo's model and saves it in each way, and a peer that keeps snapshots."""

import multiprocessing
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch
from torch._C._distributed_c10d import FileStore

from pacekeeper.core.config.run_fingerprint import run_fingerprint
from pacekeeper.core.config.train import TrainConfig
from pacekeeper.trainer.checkpoint.async_writer import SaveResult, SaveStatus
from pacekeeper.trainer.checkpoint.in_memory import Snapshots
from pacekeeper.trainer.checkpoint.manager import Checkpoints, Position
from pacekeeper.trainer.checkpoint.staging import HostCopies
from pacekeeper.trainer.distributed.collectives import LocalFabric
from pacekeeper.trainer.distributed.process_group import InterruptibleProcessGroup
from pacekeeper.trainer.toy.engine.job_rules import first_layout
from pacekeeper.trainer.toy.model.block_state_dict import ModelStates, ordered_parameters
from pacekeeper.trainer.toy.model.dataset import Corpus
from pacekeeper.trainer.toy.model.flop_counter import WorkMeter, WorkPass
from pacekeeper.trainer.toy.model.transformer import MoETransformer

WARM_STEPS = 3
NUM_RANKS = 4  # of the demo
STEP_S = TrainConfig().emulated_step_s  # of its devices, at full speed
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
        """Beyond what looking whether one is due takes, as a fraction of a step of the demo."""
        return (median(self.held_s[mode]) - median(self.held_s["none"])) / STEP_S

    @property
    def busy(self) -> float:
        """The same of the processor time in it: what a host with other work to do does not blur."""
        beside, none = self.held_cpu_s["beside"], self.held_cpu_s["none"]
        return (median(beside) - median(none)) / STEP_S

    def slowed(self, mode: str) -> float:
        """What the step after it takes longer, as a fraction of a step."""
        return median(self.next_s[mode]) / self.step_s - 1.0


class LoneRank:
    """One rank that holds the whole model and trains it alone."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.fabric = LocalFabric()
        self.layout = first_layout(config, 1)
        self.corpus = Corpus.from_stdlib(config)
        self.model = MoETransformer(config, self.layout, 0)
        self.model.set_layout(self.layout, self.fabric)
        self.optimizer = torch.optim.AdamW(ordered_parameters(self.model))
        self.checkpoints = Checkpoints(
            config,
            rank=0,
            run_id=1,
            first_run_id=1,
            identity=run_fingerprint(config, self.corpus.crc()),
            states=ModelStates(self.model, self.optimizer),
        )
        self.step = 0

    def train(self) -> float:
        """One step; seconds it took."""
        began_s, meter = time.perf_counter(), WorkMeter()
        self.optimizer.zero_grad()
        batch = self.corpus.batch(self.step, range(self.config.rows_per_step))
        self.model(batch, WorkPass(meter)).loss_sum.backward()
        self.optimizer.step()
        self.checkpoints.partial.count(meter.routed)
        self.step += 1
        return time.perf_counter() - began_s

    def save(self, mode: str, times: Times) -> None:
        """What follows a step, as the training loop does it; `blocking` waits for the end."""
        word = self.checkpoints.encode_vote(self.step, self.layout)  # travels in the vote
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


def run(config: TrainConfig, rounds: int) -> tuple[Times, LoneRank]:
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
        """By one copy, as a fraction of a step of the demo."""
        return median(self.held_s) / STEP_S

    @property
    def slowed(self) -> float:
        """What the step after it takes longer, as a fraction of a step."""
        return median(self.next_s) / median(self.none_s) - 1.0


def run_windows(config: TrainConfig, rounds: int) -> tuple[list[CopyTimes], LoneRank]:
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


def run_snapshots(config: TrainConfig, rounds: int) -> CopyTimes:
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
            pair.fabric.exchange([1.0])
            pair.fabric.close()
        finally:
            other.join(10.0)
            other.kill()
    return found


@dataclass(kw_only=True)
class Pair:
    """One of the two."""

    fabric: InterruptibleProcessGroup
    snapshots: Snapshots

    def begin(self, rank: LoneRank) -> None:
        """A snapshot of now."""
        layout = first_layout(replace(rank.config, replicas=len(PAIR)), len(PAIR), NODES)
        self.snapshots.begin(
            layout,
            rank.step,
            last_loss=0.0,
            account=rank.checkpoints.partial.account,
            new_group=lambda: self.fabric.group(self.fabric.ranks, "snapshots"),
            domain_of=NODES,
        )


def _pair(number: int, directory: str, rank: LoneRank) -> tuple[Pair, list[SaveResult]]:
    told: list[SaveResult] = []
    fabric = InterruptibleProcessGroup(
        store=FileStore(str(Path(directory, "store")), len(PAIR)),
        generation=1,
        rank=number,
        ranks=PAIR,
        is_aborted=lambda: False,
        tick_s=rank.config.tick_s,
        timeout_s=rank.config.peer_timeout_s,
    )
    snapshots = Snapshots(
        rank=number,
        run_id=1,
        states=ModelStates(rank.model, rank.optimizer),
        copies=HostCopies(),
        note=told.append,
    )
    return Pair(fabric=fabric, snapshots=snapshots), told


def _keep(directory: str, config: TrainConfig, rounds: int) -> None:
    """The body of the other's process."""
    torch.set_num_threads(1)
    rank = LoneRank(config)
    rank.train()
    pair, _ = _pair(1, directory, rank)
    for _ in range(1 + rounds):
        pair.begin(rank)
        pair.snapshots.wait()
    pair.fabric.exchange([1.0])
    pair.fabric.close()
