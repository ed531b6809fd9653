"""A schedule of faults on real processes: all of it is done to a job, and the end is judged.

How it is judged: support/fault_judge.py.
"""

import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pacekeeper.core.checkpoint.manifest import CheckpointId
from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.layout.layout import ExpertReplica, Layout, with_batch_shares
from pacekeeper.trainer.checkpoint.reader import complete_ids
from pacekeeper.trainer.checkpoint.storage import Storage, open_storage
from pacekeeper.trainer.elastic.agreement.quorum import Group, decide_quorum
from pacekeeper.trainer.elastic.loop import rank_main
from pacekeeper.trainer.parallel.layouts import start_layout
from support.endings import KeepsEnding, read_ending
from support.engine_jobs import write_data, write_model
from support.exact_jobs import rank_in_float64
from support.fault_judge import Course, Judge, Newcomers, Outcome, Reference
from support.fault_schedules import Act, Burst, Fault, Schedule
from support.fleet import Fleet, Launcher
from support.sabotage import Sabotage

# Losses against the undisturbed run; float32 drifts by itself with another order of summation.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4}
STANDING_BY = 0.25  # of plans that let a rank stand by
SETTLED_STEPS = 3  # after newcomers came in: then their group has stood for all


def body_of(schedule: Schedule, directory: Path, sabotage: Sabotage | None = None) -> KeepsEnding:
    """What runs a rank in the type of a schedule's job, and leaves its state in `directory`."""
    body = rank_in_float64 if schedule.dtype == "float64" else rank_main
    struck = None if sabotage is None else replace(sabotage, then=body)
    return KeepsEnding(directory=str(directory), body=struck or body)


def with_files(config: EngineConfig, folder: Path) -> EngineConfig:
    """The settings with a model and data in `folder`, which are made once."""
    model, tokens = folder / "model", folder / "tokens.bin"
    if not tokens.exists():
        write_data(tokens)
        write_model(model)
    return replace(config, model=str(model), data=(str(tokens),))


def random_plan(layout: Layout, replicas: int, seed: str) -> Layout:
    """The next generation: other replica ranks of experts, other shares of rows and of the batch,
    at times with a rank that stands by; nobody would make it.
    """
    draw = random.Random(seed)
    ranks = list(layout.ranks)
    standing_by = draw.sample(ranks, int(len(ranks) > 2 and draw.random() < STANDING_BY))
    working = [rank for rank in ranks if rank not in standing_by]
    number = min(replicas, len(working))

    def shares(count: int) -> list[float]:
        weights = [draw.uniform(0.5, 1.5) for _ in range(count)]
        return [weight / sum(weights) for weight in weights]

    def drawn() -> tuple[ExpertReplica, ...]:
        return tuple(map(ExpertReplica, sorted(draw.sample(working, number)), shares(number)))

    even = start_layout([0] * layout.num_layers, working)
    return replace(
        layout,
        generation=layout.generation + 1,
        pipelines=with_batch_shares(even.pipelines, shares(len(working))),
        experts=tuple(tuple(drawn() for _ in placed) for placed in layout.experts),
        speeds=(),
        standing_by=tuple(standing_by),
    )


def undisturbed(schedule: Schedule, directory: Path, *, num_ranks: int = 1) -> Reference:
    """The same steps by ranks that nobody disturbs."""
    config = replace(
        schedule.config,
        replicas=min(schedule.config.replicas, num_ranks),
        emulate=False,
        max_restarts=0,
    )
    directory.mkdir()
    config = with_files(config, directory.parent)
    body = body_of(schedule, directory)
    with Fleet(directory=directory, config=config, ranks_per_node=num_ranks, body=body) as fleet:
        assert fleet.codes() == [0], fleet.launchers[0].output()
        state: dict[str, torch.Tensor] = {}
        for rank in fleet.ranks:
            state |= read_ending(directory, rank)
        return Reference(losses=tuple(line["loss"] for line in fleet.steps(0)), state=state)


def run(
    schedule: Schedule, directory: Path, reference: Reference, *, tolerance: float | None = None
) -> Outcome:
    """Do all that the schedule says to a job in `directory`, and judge the end.

    `tolerance`: of losses (None: that of the type).
    """
    directory.mkdir()
    began_s = time.monotonic()
    body = body_of(schedule, directory, schedule.sabotage)
    config = with_files(schedule.config, directory.parent)
    if schedule.is_saving:
        config = replace(config, checkpoint_dir=str(directory / "kept"))
    with Fleet(
        directory=directory,
        config=config,
        num_nodes=schedule.num_nodes,
        ranks_per_node=schedule.ranks_per_node,
        body=body,
    ) as fleet:
        harm = Harm(schedule=schedule, fleet=fleet)
        try:
            for burst in schedule.bursts:
                if not harm.settle(burst.step):
                    break
                harm.do(burst)
            fleet.await_(lambda: all(node.code() is not None for node in harm.launchers()))
        except AssertionError as error:
            return Outcome(ending="hung", complaints=(str(error)[-4000:],))
        bound = TOLERANCES[schedule.dtype] if tolerance is None else tolerance
        judge = Judge(
            course=harm.course(), directory=directory, reference=reference, tolerance=bound
        )
        outcome = judge.outcome()
    return replace(outcome, took_s=time.monotonic() - began_s)


@dataclass(kw_only=True)
class Harm:
    """What was done so far, and what the job can be held to.

    `is_safe`: every block had a holder that nothing was done to, in any layout it may have been in.
    """

    schedule: Schedule
    fleet: Fleet
    dead: set[int] = field(default_factory=set)
    nodes: set[int] = field(default_factory=set)
    plans: dict[int, Layout] = field(default_factory=dict)
    newcomers: list[Newcomers] = field(default_factory=list)
    spoilt: set[CheckpointId] = field(default_factory=set)
    saved: list[tuple[float, int]] = field(default_factory=list)
    revived: set[int] = field(default_factory=set)
    num_restarts: int = 0
    is_safe: bool = True
    has_quorum: bool = True

    def course(self) -> Course:
        """What the judge must know of it."""
        return Course(
            schedule=self.schedule,
            fleet=self.fleet,
            dead=self.dead,
            revived=self.revived,
            newcomers=tuple(self.newcomers),
            saved=tuple(self.saved),
            num_spoilt=len(self.spoilt),
            num_restarts=self.num_restarts,
            has_lost_store=0 in self.nodes,
            is_safe=self.is_safe,
            has_quorum=self.has_quorum,
        )

    def launchers(self) -> list[Launcher]:
        """Those that were not killed."""
        return [node for n, node in enumerate(self.fleet.launchers) if n not in self.nodes]

    def settle(self, step: int) -> bool:
        """Wait for `step`, and for a layout with the newcomers and without the dead.

        False: the job ended before.
        """
        home = self.fleet.launchers[self.schedule.watcher // self.schedule.ranks_per_node]
        is_ready = False

        def look() -> bool:
            nonlocal is_ready
            log = self.fleet.log(self.schedule.watcher)
            steps = [line for line in log if "loss" in line]
            is_over = bool(steps) and steps[-1]["step"] == self.schedule.config.steps - 1
            if home.code() is not None or is_over:
                return True
            firsts = [e for e in log if e.get("event") == "plan" and e["generation"] == 1]
            if not steps or steps[-1]["step"] < step or len(firsts) <= self.num_restarts:
                return False
            since = next(i for i, line in enumerate(reversed(log)) if _is_entry(line))
            if self.newcomers and since < SETTLED_STEPS:
                return False
            ranks = set(self.layout().ranks)
            is_ready = not self.dead & ranks and all(
                self._is_settled(n, ranks) for n in self.newcomers
            )
            return is_ready

        self.fleet.await_(look)
        return is_ready

    def _is_settled(self, one: Newcomers, ranks: set[int]) -> bool:
        """In it, or not to come any more."""
        code = self.fleet.launchers[one.launcher].code()
        if code is not None and not set(one.ranks) <= self.dead:
            one.refused = f"newcomers {one.ranks} ended with code {code} while the job went on"
        return code is not None or set(one.ranks) - self.dead <= ranks

    def layout(self) -> Layout:
        """The one the watcher is in."""
        events = [e for e in self.fleet.log(self.schedule.watcher) if _is_entry(e)]
        last = events[-1]
        if last["event"] == "plan" and last["generation"] > 1:
            return self.plans[last["generation"]]
        node = self.schedule.watcher // self.schedule.ranks_per_node
        give_up_s = time.monotonic() + 10.0
        while True:
            try:
                return self.fleet.layout(last["generation"], node)
            except ValueError:  # another rank of the node writes it
                assert time.monotonic() < give_up_s, "the layout was never written"
                time.sleep(0.01)

    def do(self, burst: Burst) -> None:
        """All faults of a burst."""
        now = self.layout()
        lost = burst.victims | self.schedule.struck
        self.is_safe &= _outlives(now, lost)
        self.saved.append((time.monotonic(), self._newest()))
        for fault in burst.faults:
            time.sleep(fault.delay_s)
            match fault.act:
                case Act.PLAN:
                    seed = f"{self.schedule.name}/{now.generation}"
                    plan = random_plan(now, self.schedule.config.replicas, seed)
                    self.plans[plan.generation] = plan
                    self.is_safe &= _outlives(plan, lost)
                    self.fleet.offer(plan, base_generation=now.generation)
                    if fault.is_awaited:
                        self._await_entry(plan.generation)
                case Act.NODE:
                    left = [rank for rank in now.ranks if rank not in fault.ranks]
                    group = Group.first(now.generation, now.ranks)
                    self.has_quorum &= decide_quorum(group, left, {}).may_continue
                    node = self._launcher_of(fault.ranks[0])
                    self.nodes.add(node)
                    self.dead |= set(fault.ranks)
                    self.fleet.launchers[node].kill()
                case Act.JOIN:
                    self._join(fault)
                case Act.SPOIL:
                    self._spoil()
                case Act.ALL:
                    self.num_restarts += 1
                    self.saved.append((time.monotonic(), self._newest()))
                    before = set(self.dead)
                    self._signal(replace(fault, act=Act.KILL, ranks=tuple(self.fleet.ranks)))
                    self.revived |= before & set(self.fleet.ranks)
                    self.dead.clear()  # all are started again
                case _:
                    self._signal(fault)
        self.dead -= set().union(*(f.ranks for f in burst.faults if f.act is Act.WAKE))

    def _await_entry(self, generation: int) -> None:
        """Until the watcher is in it, or in a later one, or has ended."""
        home = self.fleet.launchers[self.schedule.watcher // self.schedule.ranks_per_node]

        def look() -> bool:
            entered = filter(_is_entry, self.fleet.log(self.schedule.watcher))
            return home.code() is not None or any(e["generation"] >= generation for e in entered)

        self.fleet.await_(look)

    def _launcher_of(self, rank: int) -> int:
        joined = {r: one.launcher for one in self.newcomers for r in one.ranks}
        return joined.get(rank, rank // self.schedule.ranks_per_node)

    def _join(self, fault: Fault) -> None:
        """Until it has its numbers: then they are what the schedule says."""
        body = body_of(self.schedule, self.fleet.directory)
        launcher = self.fleet.join(
            ranks_per_node=len(fault.ranks),
            at=(self._launcher_of(self.schedule.watcher),),
            body=body,
        )
        one = Newcomers(ranks=fault.ranks, launcher=len(self.fleet.launchers) - 1)
        self.newcomers.append(one)
        said = f"ranks={list(fault.ranks)} get ready to join"
        self.fleet.await_(lambda: launcher.code() is not None or said in launcher.output())

    def _storage(self) -> Storage:
        config = self.fleet.config
        return open_storage(f"{config.checkpoint_dir}/{config.job}")

    def _newest(self) -> int:
        """The step of the newest checkpoint that is whole, 0 for none."""
        there = complete_ids(self._storage()) if self.schedule.is_saving else []
        return next((one.step for one in there if one not in self.spoilt), 0)

    def _spoil(self) -> None:
        """The newest, if another is whole: without any a job must not begin anew by itself."""
        storage = self._storage()
        whole = [one for one in complete_ids(storage) if one not in self.spoilt]
        for one in whole[:1] if len(whole) > 1 else ():
            names = [n for n in storage.names(one.name) if n.endswith(".safetensors")]
            with contextlib.suppress(FileNotFoundError):  # it was swept meanwhile
                os.truncate(Path(storage.root, one.name, names[-1]), 100)
            self.spoilt.add(one)

    def _signal(self, fault: Fault) -> None:
        number = {
            Act.KILL: signal.SIGKILL,
            Act.FREEZE: signal.SIGSTOP,
            Act.WAKE: signal.SIGCONT,
        }[fault.act]
        for rank in fault.ranks:
            self.dead.add(rank)
            # It was fenced, it is done, or it never came.
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                os.kill(self.fleet.pid(rank), number)


def _is_entry(line: dict[str, Any]) -> bool:
    """Does this line of a log say that a layout was entered?"""
    return line.get("event") in ("plan", "regroup")


def _outlives(layout: Layout, lost: frozenset[int]) -> bool:
    """Has every block a holder that is not among the lost?"""
    return all(set(layout.holders(block)) - lost for block in layout.blocks())
