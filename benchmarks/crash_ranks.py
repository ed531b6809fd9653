"""Ranks in processes of their own that resume, save and sweep until one of them is killed.

Who is doomed counts the lines of code it runs of what it is doomed in - saving, retention,
restoring - and sends itself SIGKILL before the one that was drawn, so that kills are spread evenly
over all there is to be interrupted; or it is killed from outside, at any moment. Ranks vote as in
training, over sockets; what they save is a function of the step alone.
"""

import contextlib
import json
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from pacekeeper.cli.admin import checkpoint as checkpoint_command
from pacekeeper.core.checkpoint.manifest import checkpoint_of_file
from pacekeeper.core.config.job import JobConfig
from pacekeeper.core.config.run_fingerprint import engine_fingerprint
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Block, BlockKind, Layout
from pacekeeper.trainer.checkpoint.block_reader import Restored
from pacekeeper.trainer.checkpoint.block_states import (
    WEIGHTS,
    BlockState,
    Part,
    StateSpec,
    blocks_on,
    read_block,
    state_digest,
)
from pacekeeper.trainer.checkpoint.manager import Checkpoints, Position
from pacekeeper.trainer.groups.group import Group, PeerLost, SingleProcess
from pacekeeper.trainer.groups.typed_values import gather_values

CONFIG = JobConfig(
    job="crash",
    steps=1 << 30,
    checkpoint_period_steps=1,
    checkpoints_kept=3,
    peer_timeout_s=600.0,  # who is slow to answer on a busy host lost nothing
)
NUM_LAYERS, NUM_EXPERTS = 2, 4
MOMENTS = "moments"
# By kind of block; the embedding and the head are cut among their writers.
SHAPES: Mapping[BlockKind, Mapping[str, tuple[int, ...]]] = {
    BlockKind.EMBEDDING: {"weight": (256, 96)},
    BlockKind.ATTENTION: {"qkv": (96, 96), "out": (32, 96)},
    BlockKind.EXPERT: {"up": (32, 96), "down": (96, 32)},
    BlockKind.HEAD: {"weight": (256, 96)},
}
OTHER_SHAPES = {"weight": (4, 96)}
BROKE = "!"  # begins what a rank says that ended by a mistake
MAX_STEPS = 12  # of a trial: who was not killed by then outlives it
GC_KEEPS = 2
DISK = ("storage", "reader")
# Modules of trainer.checkpoint whose lines count, functions of others, and the most lines drawn.
DOOMED_IN: dict[str, tuple[frozenset[str], frozenset[str], int]] = {
    "save": (frozenset(("async_writer", "storage")), frozenset(), 600),
    "retention": (frozenset(("retention",)), frozenset(("discard", "remove")), 400),
    "restore": (frozenset(("manager", *DISK)), frozenset(), 400),
    "gc": (frozenset(("retention",)), frozenset(("discard", "remove")), 60),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """A directory or prefix, and how ranks save there: `experts` of each layer (0: all), or exactly
    over windows of `window_steps` (1: at once).
    """

    root: str
    experts: int = 0
    window_steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What becomes of a trial's ranks. `doomed`: the rank that is killed before line `at` of what
    `moment` names, or from outside after `after_s` where `moment` is "any"; `takes_all`: so are the
    others, as with a node. `file_bytes`: no file may become larger (0: any may).
    """

    num_ranks: int
    moment: str
    doomed: int = 0
    at: int = 0
    after_s: float = 0.0
    takes_all: bool = False
    file_bytes: int = 0

    @classmethod
    def drawn(cls, draw: random.Random, moment: str, longest_s: float) -> "Fate":
        """A random one; "gc" is one process."""
        num_ranks = 1 if moment == "gc" else draw.choice((2, 3))
        return cls(
            num_ranks=num_ranks,
            moment=moment,
            doomed=draw.randrange(num_ranks),
            at=draw.randint(1, DOOMED_IN[moment][2]) if moment in DOOMED_IN else 0,
            after_s=draw.uniform(0.0, longest_s),
            takes_all=draw.random() < 0.5,
        )


class Doom:
    """Counts lines of this process, and ends it before the drawn one; says to `tell` where."""

    def __init__(self, fate: Fate, tell: int) -> None:
        self.modules, self.functions, _ = DOOMED_IN[fate.moment]
        self.left, self.tell = fate.at, tell

    def begin(self) -> None:
        """From now on, in this thread and in those that it starts."""
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        folder, _, file = frame.f_code.co_filename.rpartition("/")
        module = file.removesuffix(".py") if folder.endswith("/trainer/checkpoint") else ""
        name = frame.f_code.co_name
        is_counted = module in self.modules or (module in DISK and name in self.functions)
        if name.startswith("<"):  # a comprehension would be counted with each of its turns
            is_counted = False
        return self._step if is_counted else None

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                os.write(self.tell, frame.f_code.co_name.encode())
                os.kill(os.getpid(), signal.SIGKILL)
        return self._step


class Star(SingleProcess):
    """A group whose lowest rank hears all and says to all what it heard."""

    def __init__(self, rank: int, ends: dict[int, socket.socket]) -> None:
        """`ends`: of the lowest rank one to each other; of each other one to it."""
        super().__init__(rank)
        self.ranks = tuple(sorted({rank, *ends}))
        self.files = {peer: ends[peer].makefile("rw") for peer in sorted(ends)}

    def all_gather(self, values: Tensor) -> Tensor:
        mine = values.tolist()
        try:
            if self.rank == 0:
                rows = [mine] + [self._heard(peer) for peer in self.files]
                for peer in self.files:
                    self._say(peer, rows)
            else:
                self._say(0, mine)
                rows = self._heard(0)
        except (OSError, ValueError) as error:
            raise PeerLost(str(error)) from None
        return torch.tensor(rows, dtype=torch.float64)

    def _say(self, peer: int, value: object) -> None:
        self.files[peer].write(json.dumps(value) + "\n")
        self.files[peer].flush()

    def _heard(self, peer: int) -> Any:
        return json.loads(self.files[peer].readline())  # ValueError: it is gone


class StepStates:
    """Blocks whose values are functions of the step; experts lie in stacks, as the engine's do."""

    device = torch.device("cpu")
    num_experts = (NUM_EXPERTS,) * NUM_LAYERS
    kinds = (WEIGHTS, MOMENTS)

    def __init__(self) -> None:
        self.num_updates = 0
        self._tensors: dict[tuple[BlockKind, int, str], Tensor] = {}

    def specs(self, block: Block) -> Sequence[StateSpec]:
        found = []
        for name, shape in SHAPES.get(block.kind, OTHER_SHAPES).items():
            found.append(StateSpec(name, WEIGHTS, shape, torch.float32))
            for key, of in (("exp_avg", shape), ("exp_avg_sq", shape), ("step", ())):
                found.append(StateSpec(f"{name}.{key}", MOMENTS, of, torch.float32))
        return sorted(found, key=lambda spec: spec.name)

    def parts(self, block: Block, kind: str) -> Mapping[str, Part]:
        is_expert = block.kind is BlockKind.EXPERT
        found = {}
        for spec in self.specs(block):
            if spec.kind == kind:
                shape = (NUM_EXPERTS, *spec.shape) if is_expert else spec.shape
                key = block.kind, block.layer, spec.name
                tensor = self._tensors.setdefault(key, torch.zeros(shape))
                found[spec.name] = Part(tensor, block.index if is_expert else None)
        return found

    def load(
        self, held: Collection[Block], state: Mapping[Block, BlockState], num_updates: int
    ) -> None:
        self.num_updates = num_updates
        for block, tensors in state.items():
            own = read_block(self, block)
            for name, value in tensors.items():
                own[name].copy_(value)

    def become(self, step: int, held: Collection[Block]) -> None:
        """The state of `step`."""
        self.num_updates = step
        for block in held:
            for name, tensor in read_block(self, block).items():
                tensor.fill_(value_of(block, name, step))


def value_of(block: Block, name: str, step: int) -> float:
    """What every element of a tensor is at `step`: of its own for each tensor of each block."""
    names = sorted(spec.name for spec in StepStates().specs(block))
    place = (list(BlockKind).index(block.kind) * NUM_LAYERS + block.layer) * NUM_EXPERTS
    return step + ((place + block.index) * len(names) + names.index(name)) / 1024


class Rank:
    """One rank whose state is a function of the step alone."""

    def __init__(self, where: Where, rank: int, run_id: int, ranks: Sequence[int] = (0,)) -> None:
        self.layout: Layout = even_layout(
            ranks=ranks,
            num_layers=NUM_LAYERS,
            num_experts=NUM_EXPERTS,
            replicas=min(2, len(ranks)),
        )
        self.held = blocks_on(self.layout, rank)
        self.states = StepStates()
        self.checkpoints = Checkpoints(
            replace(
                CONFIG,
                checkpoint_dir=where.root,
                experts_per_checkpoint=where.experts,
                checkpoint_window_steps=where.window_steps,
            ),
            rank=rank,
            run_id=run_id,
            first_run_id=run_id,
            identity=engine_fingerprint(
                family="crash",
                state=state_digest(self.states, self.layout),
                config={},
                settings={},
                data=0,
                versions={},
            ),
            states=self.states,
        )

    def become(self, step: int) -> None:
        """The state of `step`: a value of its own for each tensor."""
        self.states.become(step, self.held)

    def resume(self, group: Group | None = None) -> Restored | None:
        """Go back to the newest one that all can read, and do the steps of its window again; None
        where there is none.
        """
        group = group or SingleProcess()
        paths = self.checkpoints.agree_on_start(group)
        if not paths:
            return None
        found = self.checkpoints.stage(paths, self.layout, group)
        self.checkpoints.apply(found)
        assert isinstance(found, Restored), "it makes no snapshots"
        for step in range(found.step + 1, found.manifest.id.step + 1):
            self.become(step)
            self.checkpoints.step_is_over(step)
        return found

    def is_exact(self, found: Restored) -> bool:
        """Is what was read of every piece exactly the state of the step at which it was saved?"""
        newest = found.manifest.id.step
        for entry in found.manifest.entries:
            block, of = entry.piece.block, checkpoint_of_file(entry.file)
            assert of is not None, "the manifest was read"
            state = found.states[newest if entry.step is None else entry.step][block]
            step = of.step if entry.step is None else entry.step
            for spec in self.states.specs(block):
                if spec.kind != entry.piece.kind:
                    continue
                whole = torch.atleast_1d(state[spec.name])
                rows = entry.piece.rows(len(whole))
                wanted = value_of(block, spec.name, step)
                if not bool((whole[rows.start : rows.stop] == wanted).all()):
                    return False
        return True


def write_on(own: Rank, group: Star, doom: Doom | None, moment: str) -> None:
    """Resume, then save step after step, in lock-step, until somebody is gone."""
    if doom is not None and moment == "restore":
        doom.begin()
    found = own.resume(group)
    if moment == "restore":
        return
    if doom is not None:
        doom.begin()
    first = 1 + (0 if found is None else found.manifest.id.step)
    for step in range(first, first + MAX_STEPS):
        vote = own.checkpoints.own_vote(step, own.layout)
        own.checkpoints.receive_votes(gather_values(vote, group))
        own.become(step)
        at = Position(layout=own.layout, step=step, ticket=step, last_loss=float(step))
        own.checkpoints.save_if_due(at, is_storing=False)
        own.checkpoints.close()


def run_trial(where: Where, run_id: int, fate: Fate) -> str:
    """Start the ranks, or `pacekeeper checkpoint gc`, and see them ended; the function in which the
    doomed one was: empty where it was killed from outside or outlived the trial; or what BROKE.
    """
    pairs = {rank: socket.socketpair() for rank in range(1, fate.num_ranks)}
    heard, tell = os.pipe()
    pids = []
    for rank in range(fate.num_ranks):
        pid = os.fork()
        if pid == 0:
            os.close(heard)
            try:
                _live(where, rank, run_id, fate, pairs, tell)
            except BaseException as error:
                os.write(tell, f"{BROKE}rank {rank}: {error!r}\n".encode())
            finally:
                os._exit(0)
        pids.append(pid)
    os.close(tell)
    for pair in pairs.values():
        for end in pair:
            end.close()
    if fate.moment == "any":
        time.sleep(fate.after_s)
        os.kill(pids[fate.doomed], signal.SIGKILL)
    os.waitpid(pids[fate.doomed], 0)
    others = [pid for pid in pids if pid != pids[fate.doomed]]
    for pid in others if fate.takes_all else []:
        os.kill(pid, signal.SIGKILL)
    for pid in others:  # who was left alone sees that its peer is gone
        os.waitpid(pid, 0)
    with os.fdopen(heard, "rb") as said:
        return said.read().decode()


def _live(
    where: Where,
    rank: int,
    run_id: int,
    fate: Fate,
    pairs: dict[int, tuple[socket.socket, socket.socket]],
    tell: int,
) -> None:
    """The body of a rank's process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a full disk has as many warnings as steps
    if fate.file_bytes:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (fate.file_bytes, fate.file_bytes))
    is_doomed = rank == fate.doomed and fate.moment in DOOMED_IN
    doom = Doom(fate, tell) if is_doomed else None
    if fate.moment == "gc":
        assert doom is not None, "it is alone"
        doom.begin()
        path = f"{where.root.rstrip('/')}/{CONFIG.job}"
        os.dup2(2, 1)
        checkpoint_command.gc.main([path, "--keep", str(GC_KEEPS)], standalone_mode=False)
        return
    ends: dict[int, socket.socket] = {}
    for peer, (its, ours) in pairs.items():
        if rank == 0:
            its.close()
            ends[peer] = ours
        elif rank == peer:
            ours.close()
            ends[0] = its
        else:
            its.close()
            ours.close()
    own = Rank(where, rank, run_id, range(fate.num_ranks))
    with contextlib.suppress(PeerLost):
        write_on(own, Star(rank, ends), doom, fate.moment)
    own.checkpoints.close()
