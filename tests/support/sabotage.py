"""Bodies for rank processes that break at one exact moment; the rest is the real trainer.

All compute in float64 (`rank_in_float64`), as the ranks of a fleet do that nothing breaks.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from pacekeeper.trainer.checkpoint import manager
from pacekeeper.trainer.elastic.agreement import consensus
from pacekeeper.trainer.elastic.agreement.quorum import FIRST_GROUP
from pacekeeper.trainer.elastic.launch_spec import RankSpec
from pacekeeper.trainer.groups import elastic
from pacekeeper.trainer.groups.group import PeerLost
from support.exact_jobs import rank_in_float64


class Moment(StrEnum):
    """Where a victim dies, or a doubter loses its group although the others do not."""

    AT_START = "before it joins anything"
    IN_RESUME = "the first group stands, it has compared and read nothing"
    IN_STEP_BEFORE_VOTE = "its gradients are complete, it has not voted"
    IN_STEP_AFTER_VOTE = "it has voted and seen all votes, it has not committed the step"
    IN_MOVE_BEFORE_VOTE = "its blocks are staged, it has not voted"
    IN_MOVE_AFTER_VOTE = "it has voted and seen all votes, it has not committed the move"
    IN_SENDING_WEIGHTS = "the step is committed, weights are on their way from their owners"
    IN_EVALUATION = "the step is committed, it has not evaluated its rows"
    IN_REPLICA_CHECK = "the step is committed, it has not compared its replicas"
    IN_PROBE = "it has read its own clock, it has not sent its message"
    IN_FORMING = "it has read the verdict, the new group is being formed"
    IN_CONNECTING = "all have come to form the new group, it has not connected"
    IN_REGROUP_MOVE = "the new group stands, blocks are on their way"
    IN_RESTORE = "all go back to a checkpoint, it has not read it"
    WITH_VERDICT = "it is the leader and has written the verdict, nobody else may have read it"
    AT_END = "it has seen that everybody is done"


_AROUND_VOTES = {
    Moment.IN_STEP_BEFORE_VOTE: ("before", False),
    Moment.IN_STEP_AFTER_VOTE: ("after", False),
    Moment.IN_MOVE_BEFORE_VOTE: ("before", True),
    Moment.IN_MOVE_AFTER_VOTE: ("after", True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sabotage:
    """`victims` are killed at `moment`, `frozen` ones stopped for good; `doubters` lose the group
    there. Steps: at `step` only. `then`: what runs the rank; it may break something later.
    """

    moment: Moment
    victims: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    doubters: tuple[int, ...] = ()
    step: int = 5
    then: Callable[[RankSpec], None] = rank_in_float64

    def __call__(self, spec: RankSpec) -> None:
        if spec.rank in self.victims + self.frozen + self.doubters:
            self._arm(spec)
        self.then(spec)

    def _strike(self, spec: RankSpec) -> None:
        if spec.rank in self.victims:
            os.kill(os.getpid(), signal.SIGKILL)
        if spec.rank in self.frozen:
            os.kill(os.getpid(), signal.SIGSTOP)
        raise PeerLost("sabotage")

    def _arm(self, spec: RankSpec) -> None:
        from pacekeeper.trainer.elastic.engine_worker import EngineWorker as worker
        from pacekeeper.trainer.engine import engine
        from pacekeeper.trainer.groups import probe
        from pacekeeper.trainer.parallel import moves
        from pacekeeper.trainer.parallel.gradients import dense

        struck = list[int]()

        def strike(is_now: bool = True) -> None:
            if is_now and not struck:
                struck.append(1)
                self._strike(spec)

        match self.moment:
            case Moment.AT_START:
                strike()
            case Moment.IN_RESUME:
                wrap(worker, "resume", before=lambda _: strike())
            case moment if moment in _AROUND_VOTES:
                when, is_move = _AROUND_VOTES[moment]

                def look(target: Any, **_: object) -> None:
                    is_of_move = target.pending_layout is not None
                    strike(is_move == is_of_move and (is_move or target.step == self.step))

                wrap(worker, "_vote", **{when: look})
            case Moment.IN_SENDING_WEIGHTS:
                due = list[bool]()
                wrap(
                    engine.Engine,
                    "send_weights",
                    before=lambda target, *_: due.append(target.num_steps == self.step + 1),
                )
                wrap(dense.WeightMessage, "finish", before=lambda _: strike(due[-1]))
            case Moment.IN_EVALUATION:
                wrap(engine.Engine, "evaluate", before=lambda *_: strike())
            case Moment.IN_REPLICA_CHECK:
                wrap(worker, "check_replicas", before=lambda _: strike())
            case Moment.IN_PROBE:
                wrap(probe, "_exchange_s", before=lambda *_: strike())
            case Moment.IN_FORMING:
                wrap(elastic.Members, "meet", before=lambda f: strike(f.name != FIRST_GROUP))
            case Moment.IN_CONNECTING:
                wrap(elastic.Members, "meet", after=lambda f: strike(f.name != FIRST_GROUP))
            case Moment.IN_REGROUP_MOVE:
                wrap(moves, "diff_layouts", before=lambda *_, **__: strike())
            case Moment.IN_RESTORE:
                wrap(manager.Checkpoints, "stage", before=lambda *_: strike())
            case Moment.WITH_VERDICT:
                wrap(consensus.Agreement, "_replicate_verdict", before=lambda *_: strike())
            case Moment.AT_END:
                wrap(worker, "finish", after=lambda _: strike())


@dataclass(frozen=True, slots=True, kw_only=True)
class Hasty:
    """Ranks that wait a shorter time for the notices of death that would make them a quorum."""

    quorum_wait_s: float

    def __call__(self, spec: RankSpec) -> None:
        consensus.QUORUM_WAIT_S = self.quorum_wait_s
        rank_in_float64(spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulty:
    """Ranks that obey the fault orders in `faults_dir`, as those of the demo do."""

    faults_dir: str

    def __call__(self, spec: RankSpec) -> None:
        rank_in_float64(replace(spec, faults_dir=self.faults_dir))


@dataclass(frozen=True, slots=True, kw_only=True)
class BadGradient:
    """The part of the loss that is rank `victim`'s is infinite in `step`, and so are gradients.

    With a `doubter`, which then loses the group, the victim is killed when all votes are in.
    """

    victim: int
    step: int
    doubter: int | None = None

    def __call__(self, spec: RankSpec) -> None:
        if spec.rank == self.victim:
            self._arm()
        doubters = () if self.doubter is None else (self.doubter,)
        victims = () if self.doubter is None else (self.victim,)
        Sabotage(
            moment=Moment.IN_STEP_AFTER_VOTE, victims=victims, doubters=doubters, step=self.step
        )(spec)

    def _arm(self) -> None:
        from pacekeeper.trainer.elastic.engine_worker import EngineWorker
        from pacekeeper.trainer.engine.passes import Chunks

        loss, at = Chunks.loss, [0]

        def infinite(self_: Chunks, *args: Any) -> Tensor:
            return loss(self_, *args) * (torch.inf if at[0] == self.step else 1.0)

        wrap(EngineWorker, "do_step", before=lambda target: at.__setitem__(0, target.step))
        Chunks.loss = infinite  # type: ignore[assignment,method-assign]


@dataclass(frozen=True, slots=True, kw_only=True)
class LateStart:
    """Rank `late` needs `start_s` longer than the others to come; `victim` is dead by then."""

    late: int
    start_s: float
    victim: int | None = None

    def __call__(self, spec: RankSpec) -> None:
        if spec.rank == self.late:
            time.sleep(self.start_s)
        if spec.rank == self.victim:
            os.kill(os.getpid(), signal.SIGKILL)
        rank_in_float64(spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadCopy:
    """Once, right after `step`, one bit of rank `victim`'s first expert of `layer` is another."""

    victim: int
    step: int
    layer: int
    is_repeated: bool = False  # whenever the step is done

    def __call__(self, spec: RankSpec) -> None:
        from pacekeeper.trainer.elastic.engine_worker import EngineWorker

        flipped: list[int] = []

        def flip(target: EngineWorker) -> None:
            if target.step == self.step and (not flipped or self.is_repeated):
                flipped.append(1)
                flip_bit(next(iter(target.engine.store.stacked(self.layer).values())))

        if spec.rank == self.victim:
            wrap(EngineWorker, "_update", after=flip)
        rank_in_float64(spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherNode:
    """Ranks (`victims`, else all) whose node has other files or another installation.

    Attributes:
        settings: Values of `[engine]` that are other ones there.
        transformers: The version there; "": the same.
    """

    victims: tuple[int, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    transformers: str = ""

    def __call__(self, spec: RankSpec) -> None:
        if spec.rank in (self.victims or (spec.rank,)):
            if self.transformers:
                from pacekeeper.trainer.model import library

                library.VERSION = self.transformers
            spec = replace(spec, config=replace(spec.config, **self.settings))
        rank_in_float64(spec)


def flip_bit(tensor: Tensor) -> None:
    """A late bit of its first number: no norm would show it, and no rounding takes it away."""
    tensor.data.reshape(-1)[:1].view(torch.uint8)[1:2].bitwise_xor_(128)


def wrap(
    owner: Any,
    name: str,
    *,
    before: Callable[..., object] | None = None,
    after: Callable[..., object] | None = None,
) -> None:
    """Call `before` and `after` around a function, with its arguments."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **values: Any) -> Any:
        if before is not None:
            before(*args, **values)
        result = original(*args, **values)
        if after is not None:
            after(*args, **values)
        return result

    setattr(owner, name, wrapped)
