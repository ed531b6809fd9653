"""What a policy of the simulated cluster is asked, and what it answers: values and one protocol.

A policy says what a job goes on with after a change and what going there takes; the loop
(`simulator/engine/event_loop.py`) spends the time. A further policy is one file with one class of
this protocol. Jobs of data and expert parallel ranks run on layouts, pipelined ones on
`simulator/jobs/pipeline_assignment.py`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pacekeeper.core.layout.layout import Layout
from pacekeeper.simulator.jobs.data_parallel import Dispatch

Array = npt.NDArray[np.float64]
Range = tuple[float, float]
"""The least and the most of what is drawn evenly."""


class Assignment(Protocol):
    """What a job runs on."""

    @property
    def ranks(self) -> tuple[int, ...]: ...


W = TypeVar("W", bound=Assignment)
W_contra = TypeVar("W_contra", bound=Assignment, contravariant=True)


class Job(Protocol[W_contra]):
    """What is simulated: sizes, and what a step takes. Its routing has the same numbers."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_experts(self) -> int: ...

    @property
    def state_bytes(self) -> int:
        """Everything once: what a checkpoint holds."""

    def has_room(self, num_nodes: int) -> bool:
        """Do so many nodes hold the model?"""

    def is_alive(self, work: W_contra, living: Collection[int], /) -> bool:
        """Do living ranks hold all of it?"""

    def samples_per_step(self, work: W_contra, /) -> float: ...

    def paced_s(self, work: W_contra, /) -> float:
        """Of a step at full pace: all ranks of the work healthy, each with as much to do."""

    @property
    def samples_per_node_s(self) -> float:
        """Samples that a node of speed 1.0 trains in a second at full pace."""

    def step_s(
        self, work: W_contra, parts: Array, speed: Mapping[int, float], dispatch: Dispatch, /
    ) -> float: ...


class Use(StrEnum):
    """What a second of the job went into; every second into one."""

    TRAINED = "computing"  # steps that count in the end: what they take at full pace
    HELD_UP = "held up"  # what they took longer: uneven work, and nodes that are slow
    SAVED = "saving"  # training stands while a checkpoint is made
    NOTICED = "detecting"  # until the living know of a loss
    PLANNED = "planning"
    REGROUPED = "regrouping"  # new groups of those who are there
    MOVED = "moving"  # copies between nodes
    REDONE = "lost work"  # steps that were lost with what was not saved
    BROKEN_OFF = "broken off"  # a step that nobody finished
    RESTARTED = "restarting"  # processes and state from storage
    WAITED = "waiting for nodes"  # too few nodes for the model


RECONFIGURING = frozenset({Use.NOTICED, Use.PLANNED, Use.REGROUPED, Use.MOVED})


class Cause(StrEnum):
    """Why a policy is asked."""

    START = "start"  # nothing is held: the beginning, or after the job had too few nodes
    LOST = "lost"  # nodes of its layout are gone
    GROWN = "grown"  # nodes have joined
    PACED = "paced"  # nodes became slower or faster: who does not measure, does not know
    DUE = "due"  # its own period, or what it asked to be woken for


# Python 3.11 cannot make a frozen generic with slots by its alias: these two have none.
@dataclass(frozen=True, kw_only=True)
class MomentOf(Generic[W]):
    """What is so when a policy is asked.

    `nodes`: the living ones of the job, ascending. `layout`: what is held now, dead nodes included;
    None: state is in storage only (`step` > 0), or there is none yet. `parts` [layers, experts]:
    recent loads. `speed`: true speeds of nodes that are not at 1.0. `memory`: of the policy's last
    answer. `layout_step`: the step since which the layout is in force. `is_fresh`: there was no
    layout yet, so that nothing has to be brought back.
    """

    now_s: float
    cause: Cause
    step: int
    nodes: tuple[int, ...]
    layout: W | None
    layout_step: int
    parts: Array
    speed: Mapping[int, float]
    memory: object
    draws: "Draws"
    is_fresh: bool

    @property
    def lost(self) -> tuple[int, ...]:
        """Nodes of the layout that are gone."""
        held = () if self.layout is None else self.layout.ranks
        return tuple(node for node in held if node not in self.nodes)


@dataclass(frozen=True, kw_only=True)
class AnswerOf(Generic[W]):
    """How the job goes on: on `layout`, after `phases`, one after the other.

    No layout: it can not, until nodes join. `is_rolled_back`: from the newest checkpoint.
    `again_after_steps`: ask once more then (Cause.DUE). `copied_bytes`: between nodes.
    `saving`: what its checkpoints take from now on; None: what its costs say.
    """

    layout: W | None
    phases: tuple[tuple[Use, float], ...] = ()
    is_rolled_back: bool = False
    again_after_steps: int | None = None
    copied_bytes: int = 0
    memory: object = None
    saving: "Saving | None" = None
    reason: str = ""


class PolicyOf(Protocol[W]):
    """A way to keep a job going; `job` is of the kind that it knows."""

    @property
    def name(self) -> str: ...

    @property
    def checkpoint_steps(self) -> int | None:
        """Steps between two checkpoints; None: there are none."""

    @property
    def review_steps(self) -> int | None:
        """Steps after which it wants to be asked again (Cause.DUE); None: never."""

    @property
    def dispatch(self) -> Dispatch:
        """How its trainer sends tokens to experts."""

    @property
    def costs(self) -> "Costs": ...

    def answer(self, moment: MomentOf[W], job: Any) -> AnswerOf[W]: ...


Moment = MomentOf[Layout]
Answer = AnswerOf[Layout]
Policy = PolicyOf[Layout]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Seconds for which a checkpoint stops training, and after which it is whole."""

    stop_s: float
    behind_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of reconfiguration and storage, each with its source where it is set.

    `transfer_s`: of one move, and for each byte of it. `restart_s`: from a stop to the first step
    from storage. `save_s_per_byte`: of writing state; `copy_s_per_byte`: of a rank's copy of its
    part to host memory, after which it is written beside the training. None: training waits until
    it is written. `grow_wait_s`: nodes that join are let in together so long after the first.
    `plan_s`, `plan_s_per_node`: of a plan that the job waits for, whichever is longer.
    """

    notice_s: Range
    regroup_s: Range
    transfer_s: float
    transfer_s_per_byte: float
    restart_s: Range
    save_s_per_byte: float
    grow_wait_s: float
    copy_s_per_byte: float | None = None
    plan_s: float = 0.0
    plan_s_per_node: float = 0.0

    def saving(self, job: Job[Any], num_nodes: int) -> "Saving":
        """What a checkpoint takes; ranks copy equal parts."""
        writing_s = job.state_bytes * self.save_s_per_byte
        if self.copy_s_per_byte is None:
            return Saving(stop_s=writing_s, behind_s=0.0)
        copying_s = job.state_bytes / num_nodes * self.copy_s_per_byte
        return Saving(stop_s=copying_s, behind_s=writing_s)

    def restart(self, moment: MomentOf[Any]) -> tuple[Use, float]:
        """A start from storage."""
        return Use.RESTARTED, moment.draws.between(self.restart_s, moment.now_s, "restart")

    def regrouping(
        self, moment: MomentOf[Any], num_bytes: int, *, is_planned: bool
    ) -> tuple[tuple[Use, float], ...]:
        """Where nodes were lost, noticing it; then a plan, new groups, and copies."""
        draws, now_s = moment.draws, moment.now_s
        return nonzero_phases(
            (Use.NOTICED, draws.between(self.notice_s, now_s, "notice") if moment.lost else 0.0),
            (Use.PLANNED, self.planning_s(len(moment.nodes)) if is_planned else 0.0),
            (Use.REGROUPED, draws.between(self.regroup_s, now_s, "regroup")),
            (Use.MOVED, self.copying_s(num_bytes)),
        )

    def planning_s(self, num_nodes: int) -> float:
        """Of a plan that the job waits for."""
        return max(self.plan_s, num_nodes * self.plan_s_per_node)

    def copying(self, num_bytes: int) -> tuple[tuple[Use, float], ...]:
        """Copies between nodes that are all there; nothing for nothing."""
        return nonzero_phases((Use.MOVED, self.copying_s(num_bytes)))

    def copying_s(self, num_bytes: int) -> float:
        """Of moving so much between nodes; nothing for nothing."""
        return self.transfer_s + num_bytes * self.transfer_s_per_byte if num_bytes else 0.0


def nonzero_phases(*phases: tuple[Use, float]) -> tuple[tuple[Use, float], ...]:
    """Those that take any time."""
    return tuple((use, taken_s) for use, taken_s in phases if taken_s > 0.0)


# Lazarus' test-bed (arXiv 2407.04656, 6.3 and 6.4; docs/simulator.md): 20-40 s for each event, of
# which NCCL's time-out 10-20 s and new groups 5-15 s; transfers are a line through its four printed
# events; 3-5 min lost per restart; checkpoints to NFS over 10 Gb/s; 2 min of waiting for nodes. A
# plan takes "less than" 0.1 s for ten nodes (6.3) and 1 s for 1,000 (6.7): taken as that.
PRINTED_TRANSFERS = ((11 * 63e6, 2.3), (52 * 63e6, 3.0), (160 * 112e6, 7.6), (55 * 112e6, 7.8))


def _transfer_line() -> tuple[float, float]:
    """(seconds, seconds per byte) by least squares."""
    (copied, taken) = np.array(PRINTED_TRANSFERS).T
    slope, start = np.polyfit(copied, taken, 1)
    return float(start), float(slope)


PUBLISHED = Costs(
    notice_s=(10.0, 20.0),
    regroup_s=(5.0, 15.0),
    transfer_s=_transfer_line()[0],
    transfer_s_per_byte=_transfer_line()[1],
    restart_s=(180.0, 300.0),
    save_s_per_byte=8.0 / 10e9,
    grow_wait_s=120.0,
    plan_s=0.1,
    plan_s_per_node=0.001,
)


@dataclass(frozen=True, slots=True)
class Draws:
    """Chance that does not depend on the order of questions: by seed, moment and name only.

    So every policy meets the same luck at the same event.
    """

    seed: int

    def between(self, range_s: Range, now_s: float, what: str) -> float:
        """Evenly drawn."""
        return range_s[0] + self.number(now_s, what) / 2.0**64 * (range_s[1] - range_s[0])

    def number(self, now_s: float, what: str) -> int:
        """Of 64 bits."""
        text = f"{self.seed} {round(now_s * 1e3)} {what}".encode()
        return int.from_bytes(blake2b(text, digest_size=8).digest())
