"""A schedule of faults on real processes, and whether all came out as it must.

Survivors must have done every step once with the losses of the undisturbed run, and hold equal
copies of every expert. Only where no rank could help it may the job end otherwise: with the stated
code and reason.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from pacekeeper.core.errors import ExitCode
from pacekeeper.core.layout import Layout
from pacekeeper.trainer.loop import rank_main
from pacekeeper.trainer.quorum import Group, rule
from support.endings import KeepsEnding, ending_path, read_ending
from support.fault_schedules import Act, Burst, Fault, Schedule, random_plan
from support.fleet import Fleet, Launcher

# Losses against the undisturbed run; float32 drifts by itself with another order of summation.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4}
_LOST = re.compile(r"layer \d+ expert \d+: all its hosts \[([\d, ]+)\] are dead; ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """An undisturbed run: losses by step, and what its rank held at the end."""

    losses: tuple[float, ...]
    state: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a schedule. `ending`: "done", "lost state", "no quorum" or "hung".

    `complaints`: what should not be; `num_lost_steps` and `num_lost_experts` are of the survivors.
    `deviation`: the largest of losses from the undisturbed run, relative. `num_moves` and
    `num_regroups`: what the watcher took part in.
    """

    ending: str
    complaints: tuple[str, ...] = ()
    num_lost_steps: int = 0
    num_lost_experts: int = 0
    deviation: float = 0.0
    num_moves: int = 0
    num_regroups: int = 0
    took_s: float = 0.0
    losses: tuple[float, ...] = ()


def undisturbed(schedule: Schedule, directory: Path, *, num_ranks: int = 1) -> Reference:
    """The same steps by ranks that nobody disturbs."""
    config = replace(schedule.config, replicas=min(schedule.config.replicas, num_ranks))
    directory.mkdir()
    body = KeepsEnding(directory=str(directory))
    with Fleet(
        directory=directory, config=config, ranks_per_node=num_ranks, body=body, is_quick=True
    ) as fleet:
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
    body = KeepsEnding(directory=str(directory), body=schedule.sabotage or rank_main)
    with Fleet(
        directory=directory,
        config=schedule.config,
        num_nodes=schedule.num_nodes,
        ranks_per_node=schedule.ranks_per_node,
        body=body,
        is_quick=True,
    ) as fleet:
        harm = _Harm(schedule=schedule, fleet=fleet)
        try:
            for burst in schedule.bursts:
                if not harm.settle(burst.step):
                    break
                harm.do(burst)
            fleet.await_(lambda: all(node.code() is not None for node in harm.launchers()))
        except AssertionError as error:
            return Outcome(ending="hung", complaints=(str(error)[-4000:],))
        bound = TOLERANCES[schedule.config.dtype] if tolerance is None else tolerance
        judge = _Judge(harm=harm, directory=directory, reference=reference, tolerance=bound)
        outcome = judge.outcome()
    return replace(outcome, took_s=time.monotonic() - began_s)


def apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference of two runs' losses, over the steps that both did."""
    return max((abs(a / b - 1.0) for a, b in zip(ours, theirs, strict=False)), default=0.0)


@dataclass(kw_only=True)
class _Harm:
    """What was done so far, and what the job can be held to.

    `is_safe`: every expert had a host that nothing was done to, in any layout it may have been in.
    """

    schedule: Schedule
    fleet: Fleet
    dead: set[int] = field(default_factory=set)
    nodes: set[int] = field(default_factory=set)
    plans: dict[int, Layout] = field(default_factory=dict)
    is_safe: bool = True
    has_quorum: bool = True

    def launchers(self) -> list[Launcher]:
        """Those that were not killed."""
        return [node for n, node in enumerate(self.fleet.launchers) if n not in self.nodes]

    def settle(self, step: int) -> bool:
        """Wait for `step`, and for a layout without the dead. False: the job ended before."""
        home = self.fleet.launchers[self.schedule.watcher // self.schedule.ranks_per_node]
        is_ready = False

        def look() -> bool:
            nonlocal is_ready
            steps = self.fleet.steps(self.schedule.watcher)
            is_there = bool(steps) and steps[-1]["step"] >= step
            is_ready = is_there and not self.dead & set(self.layout().ranks)
            is_over = len(steps) == self.schedule.config.steps
            return is_ready or is_over or home.code() is not None

        self.fleet.await_(look)
        return is_ready

    def layout(self) -> Layout:
        """The one the watcher is in."""
        events = [e for e in self.fleet.log(self.schedule.watcher) if "took_s" in e]
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
        self.is_safe &= _hosts_all(now, lost)
        for fault in burst.faults:
            time.sleep(fault.delay_s)
            match fault.act:
                case Act.PLAN:
                    seed = f"{self.schedule.name}/{now.generation}"
                    plan = random_plan(now, self.schedule.config.replicas, seed)
                    self.plans[plan.generation] = plan
                    self.is_safe &= _hosts_all(plan, lost)
                    self.fleet.offer(plan, base_generation=now.generation)
                case Act.NODE:
                    left = [rank for rank in now.ranks if rank not in fault.ranks]
                    group = Group.first(now.generation, now.ranks)
                    self.has_quorum &= rule(group, left, {}).goes_on
                    node = fault.ranks[0] // self.schedule.ranks_per_node
                    self.nodes.add(node)
                    self.dead |= set(fault.ranks)
                    self.fleet.launchers[node].kill()
                case _:
                    self._signal(fault)
        self.dead -= set().union(*(f.ranks for f in burst.faults if f.act is Act.WAKE))

    def _signal(self, fault: Fault) -> None:
        number = {
            Act.KILL: signal.SIGKILL,
            Act.FREEZE: signal.SIGSTOP,
            Act.WAKE: signal.SIGCONT,
        }[fault.act]
        for rank in fault.ranks:
            with contextlib.suppress(ProcessLookupError):  # it was fenced, or it is done
                os.kill(self.fleet.pid(rank), number)
                self.dead.add(rank)


def _hosts_all(layout: Layout, lost: frozenset[int]) -> bool:
    """Has every expert a host that is not among the lost?"""
    return all({host.rank for host in on} - lost for layer in layout.experts for on in layer)


@dataclass(kw_only=True)
class _Judge:
    """The end of one job against what must be."""

    harm: _Harm
    directory: Path
    reference: Reference
    tolerance: float
    complaints: list[str] = field(default_factory=list)

    def outcome(self) -> Outcome:
        fleet, harm = self.harm.fleet, self.harm
        dead = harm.dead | self._struck()
        survivors = [rank for rank in fleet.ranks if rank not in dead]
        node_of = {rank: rank // fleet.ranks_per_node for rank in fleet.ranks}
        codes = {fleet.launchers[node_of[rank]].code() for rank in survivors}
        said = "\n".join(node.output() for node in fleet.launchers)
        losses = self._losses(survivors)
        deviation = max(apart(own, self.reference.losses) for own in losses.values())
        if deviation > self.tolerance:
            self._complain(f"losses are off by {deviation:.1e}")
        missing = lost = 0
        match next(iter(codes)) if len(codes) == 1 else None:
            case ExitCode.OK:
                ending = "done"
                if not harm.has_quorum:
                    self._complain("a side that is no quorum went on")
                missing = sum(len(self.reference.losses) - len(own) for own in losses.values())
                if missing:
                    self._complain(f"{missing} steps are missing")
                lost = self._judge_state(survivors)
            case ExitCode.NO_QUORUM:
                ending = "no quorum"
                if harm.has_quorum or "are no quorum" not in said:
                    self._complain("it could have gone on, or says nothing")
            case ExitCode.LOST_STATE:
                ending = "lost state"
                named = [{*map(int, m.split(","))} for m in _LOST.findall(said)]
                if harm.is_safe or not named or not all(hosts <= dead for hosts in named):
                    self._complain(f"no expert had to be lost: {named} of {sorted(dead)}")
            case _:
                ending = "wrong"
                self._complain(f"codes {codes} of ranks {survivors}")
        if self.complaints:
            self._complain(said[-6000:])
        return Outcome(
            ending=ending,
            complaints=tuple(self.complaints),
            num_lost_steps=missing,
            num_lost_experts=lost,
            deviation=deviation,
            num_moves=len(fleet.events(harm.schedule.watcher, "plan")) - 1,
            num_regroups=len(fleet.events(harm.schedule.watcher, "regroup")),
            losses=losses[survivors[0]],
        )

    def _complain(self, what: str) -> None:
        self.complaints.append(what)

    def _struck(self) -> set[int]:
        """Who came to its moment: it died there, or was fenced."""
        said = "\n".join(node.output() for node in self.harm.fleet.launchers)
        return {r for r in self.harm.schedule.struck if f"rank={r} died" in said}

    def _losses(self, survivors: list[int]) -> dict[int, tuple[float, ...]]:
        """By rank; every step once and in order, or it is said."""
        found = {}
        for rank in survivors:
            steps = self.harm.fleet.steps(rank)
            if [line["step"] for line in steps] != list(range(len(steps))):
                self._complain(f"rank {rank} did steps {[line['step'] for line in steps]}")
            found[rank] = tuple(line["loss"] for line in steps)
        return found

    def _judge_state(self, survivors: list[int]) -> int:
        """Copies are equal bit by bit, and those of the undisturbed run; lost experts."""
        wanted = self.reference.state
        seen: dict[str, torch.Tensor] = {}
        for rank in survivors:
            if not ending_path(self.directory, rank).exists():
                self._complain(f"rank {rank} left no state")
                continue
            for name, tensor in read_ending(self.directory, rank).items():
                if not torch.equal(seen.setdefault(name, tensor), tensor):
                    self._complain(f"{name} on rank {rank} is another than before it")
        if self.harm.schedule.config.dtype == "float64":
            for name, tensor in seen.items():
                scale = wanted[name].abs().max().clamp(min=1e-300)
                off = float((tensor - wanted[name]).abs().max() / scale)
                if not off <= 1e-7:  # single values; their sums, the losses, are held to 1e-9
                    self._complain(f"{name} is off by {off:.1e}")
        experts = {name.rsplit("/w", 1)[0] for name in wanted if not name.startswith("dense")}
        lost = experts - {name.rsplit("/w", 1)[0] for name in seen}
        if lost:
            self._complain(f"nobody holds experts {sorted(lost)}")
        return len(lost)
