"""Did all come out as it must? The end of a job that a schedule of faults was done to.

Survivors must have done every step with the losses of the undisturbed run, and hold equal copies of
every expert. They do a step again only where a checkpoint was all that was left, and then no more
than since the newest whole one. Only where no rank could help it may the job end otherwise: with
the stated code and reason.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch

from pacekeeper.core.errors import ExitCode
from support.endings import ending_path, read_ending
from support.fault_schedules import Schedule
from support.fleet import Fleet

_LOST = re.compile(r"layer \d+ expert \d+: all its replicas \[([\d, ]+)\] are dead; ")


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
    `num_regroups`: what the watcher took part in. `num_joined`: ranks that came in.
    `num_restarts`: of everything; `num_went_back`: times that the watcher went on from a
    checkpoint, these counted. `num_spoilt`: checkpoints. `has_lost_store`: the first node died,
    with the store that all met at.
    """

    ending: str
    complaints: tuple[str, ...] = ()
    num_lost_steps: int = 0
    num_lost_experts: int = 0
    deviation: float = 0.0
    num_moves: int = 0
    num_regroups: int = 0
    num_joined: int = 0
    num_restarts: int = 0
    num_went_back: int = 0
    num_spoilt: int = 0
    has_lost_store: bool = False
    took_s: float = 0.0
    losses: tuple[float, ...] = ()


@dataclass(slots=True, kw_only=True)
class Newcomers:
    """The ranks of a node that joined, and its launcher's number. `refused`: why, if it was."""

    ranks: tuple[int, ...]
    launcher: int
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What was done. `dead`: ranks that were to be dead at the end; `revived`: those that were
    dead before all were started again, and missed some steps. `saved`: (when, step of the
    newest whole checkpoint) before each blow. `is_safe`: no expert can have lost all its hosts.
    """

    schedule: Schedule
    fleet: Fleet
    dead: set[int]
    revived: set[int]
    newcomers: tuple[Newcomers, ...]
    saved: tuple[tuple[float, int], ...]
    num_spoilt: int
    num_restarts: int
    has_lost_store: bool
    is_safe: bool
    has_quorum: bool


def apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference of two runs' losses, over the steps that both did."""
    return max((abs(a / b - 1.0) for a, b in zip(ours, theirs, strict=False)), default=0.0)


@dataclass(kw_only=True)
class Judge:
    """The end of one job against what must be."""

    course: Course
    directory: Path
    reference: Reference
    tolerance: float
    complaints: list[str] = field(default_factory=list)

    def outcome(self) -> Outcome:
        fleet, course = self.course.fleet, self.course
        dead = course.dead | self._struck()
        came = [rank for one in course.newcomers for rank in one.ranks if fleet.steps(rank)]
        survivors = [rank for rank in (*fleet.ranks, *came) if rank not in dead]
        node_of = {rank: rank // fleet.ranks_per_node for rank in fleet.ranks}
        node_of |= {rank: one.launcher for one in course.newcomers for rank in one.ranks}
        codes = {fleet.launchers[node_of[rank]].code() for rank in survivors}
        said = "\n".join(node.output() for node in fleet.launchers)
        self.complaints += [one.refused for one in course.newcomers if one.refused]
        losses = {rank: self._losses(rank) for rank in survivors}
        deviation = max(
            abs(loss / self.reference.losses[step] - 1.0)
            for rank in survivors
            for step, loss in losses[rank]
        )
        if not deviation <= self.tolerance:
            self._complain(f"losses are off by {deviation:.1e}")
        missing = lost = 0
        match next(iter(codes)) if len(codes) == 1 else None:
            case ExitCode.OK:
                ending = "done"
                if not course.has_quorum:
                    self._complain("a side that is no quorum went on")
                missing = sum(self._num_missing(rank, losses[rank]) for rank in survivors)
                if missing:
                    self._complain(f"{missing} steps are missing")
                lost = self._judge_state(survivors)
            case ExitCode.NO_QUORUM:
                ending = "no quorum"
                if course.has_quorum or "are no quorum" not in said:
                    self._complain("it could have gone on, or says nothing")
            case ExitCode.LOST_STATE:
                ending = "lost state"
                named = [{*map(int, m.split(","))} for m in _LOST.findall(said)]
                if course.is_safe or not named or not all(hosts <= dead for hosts in named):
                    self._complain(f"no expert had to be lost: {named} of {sorted(dead)}")
                if course.saved[-1][1]:
                    self._complain("there was a checkpoint to go back to")
            case _:
                ending = "wrong"
                self._complain(f"codes {codes} of ranks {survivors}")
        watched = course.schedule.watcher
        num_lost, num_went_back = self._judge_ways_back(watched)
        if self.complaints:
            self._complain(said[-6000:])
        return Outcome(
            ending=ending,
            complaints=tuple(self.complaints),
            num_lost_steps=missing + num_lost,
            num_lost_experts=lost,
            deviation=deviation,
            num_moves=sum(e["generation"] > 1 for e in fleet.events(watched, "plan")),
            num_regroups=len(fleet.events(watched, "regroup")),
            num_joined=len(came),
            num_restarts=course.num_restarts,
            num_went_back=num_went_back,
            num_spoilt=course.num_spoilt,
            has_lost_store=course.has_lost_store,
            losses=tuple(dict(losses[watched]).values()),
        )

    def _complain(self, what: str) -> None:
        self.complaints.append(what)

    def _struck(self) -> set[int]:
        """Who came to its moment: it died there, or was fenced."""
        said = "\n".join(node.output() for node in self.course.fleet.launchers)
        return {r for r in self.course.schedule.struck if f"rank={r} died" in said}

    def _losses(self, rank: int) -> list[tuple[int, float]]:
        """(step, loss) of all it did; steps follow each other or go back, or it is said."""
        steps = self.course.fleet.steps(rank)
        has_gap = any(b["step"] > a["step"] + 1 for a, b in pairwise(steps))
        if has_gap and rank not in self.course.revived:
            self._complain(f"rank {rank} did steps {[line['step'] for line in steps]}")
        return [(line["step"], line["loss"]) for line in steps]

    def _num_missing(self, rank: int, losses: list[tuple[int, float]]) -> int:
        """Of the steps that it was there for."""
        if rank in self.course.revived:
            return len(self.reference.losses) - 1 - losses[-1][0]
        first = 0 if rank in self.course.fleet.ranks else losses[0][0]
        return len(set(range(first, len(self.reference.losses))) - {step for step, _ in losses})

    def _judge_ways_back(self, rank: int) -> tuple[int, int]:
        """(steps that were lost though a checkpoint had them, times that it went back)."""
        lost, steps = 0, self.course.fleet.steps(rank)
        back = [b for a, b in pairwise(steps) if b["step"] <= a["step"]]
        for line in back:
            saved = [step for at_s, step in self.course.saved if at_s < line["ended_mono_s"]]
            if saved and line["step"] < saved[-1]:
                lost += saved[-1] - line["step"]
                self._complain(f"went on from step {line['step']}, step {saved[-1]} was saved")
        if back and self.course.is_safe and len(back) > self.course.num_restarts:
            self._complain(f"went back {len(back)} times, all experts had living hosts")
        return lost, len(back)

    def _judge_state(self, survivors: list[int]) -> int:
        """Copies are equal bit by bit, and those of the undisturbed run; lost experts."""
        wanted = self.reference.state
        seen: dict[str, torch.Tensor] = {}
        # Where state was lost for good and all were started again, the dead live, too.
        ended = [r for r in self.course.fleet.ranks if ending_path(self.directory, r).exists()]
        for rank in sorted({*survivors, *ended}):
            if not ending_path(self.directory, rank).exists():
                self._complain(f"rank {rank} left no state")
                continue
            for name, tensor in read_ending(self.directory, rank).items():
                if not torch.equal(seen.setdefault(name, tensor), tensor):
                    self._complain(f"{name} on rank {rank} is another than before it")
        if self.course.schedule.dtype == "float64":
            for name, tensor in seen.items():
                scale = wanted[name].abs().max().clamp(min=1e-300)
                off = float((tensor - wanted[name]).abs().max() / scale)
                if not off <= 1e-7:  # single values; their sums, the losses, are held to 1e-9
                    self._complain(f"{name} is off by {off:.1e}")
        lost = {name.rpartition("/")[0] for name in wanted.keys() - seen.keys()}
        if lost:
            self._complain(f"nobody holds {sorted(lost)}")
        return sum("expert" in block for block in lost)
