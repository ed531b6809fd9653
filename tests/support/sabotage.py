"""Bodies for rank processes that break at one exact moment; the rest is the real trainer."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from pacekeeper.trainer.checkpoint import manager
from pacekeeper.trainer.distributed import microbenchmark, process_group
from pacekeeper.trainer.elastic import loop
from pacekeeper.trainer.elastic.agreement import consensus
from pacekeeper.trainer.elastic.agreement.quorum import FIRST_GROUP
from pacekeeper.trainer.elastic.launch_spec import RankSpec
from pacekeeper.trainer.groups import elastic
from pacekeeper.trainer.groups.group import PeerLost
from pacekeeper.trainer.toy.engine import worker
from pacekeeper.trainer.toy.engine.worker import Rank
from pacekeeper.trainer.toy.model import dataset
from pacekeeper.trainer.toy.parallel import resharding


class Moment(StrEnum):
    """Where a victim dies, or a doubter loses its group although the others do not."""

    AT_START = "before it joins anything"
    IN_STEP_BEFORE_VOTE = "its gradients are complete, it has not voted"
    IN_STEP_AFTER_VOTE = "it has voted and seen all votes, it has not committed the step"
    IN_MOVE_BEFORE_VOTE = "its blocks are staged, it has not voted"
    IN_MOVE_AFTER_VOTE = "it has voted and seen all votes, it has not committed the move"
    IN_PROBE = "it has read its own clock, it has not sent its message"
    IN_FORMING = "it has read the verdict, the new group is being formed"
    IN_CONNECTING = "all have come to form the new group, it has not connected"
    IN_REGROUP_MOVE = "the new group stands, blocks are on their way"
    IN_RESTORE = "all go back to a checkpoint, it has not read it"
    WITH_VERDICT = "it is the leader and has written the verdict, nobody else may have read it"
    AT_END = "it has seen that everybody is done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sabotage:
    """`victims` are killed at `moment`, `frozen` ones stopped for good; `doubters` lose the group
    there. Steps: at `step` only.
    """

    moment: Moment
    victims: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    doubters: tuple[int, ...] = ()
    step: int = 5

    def __call__(self, spec: RankSpec) -> None:
        if spec.rank in self.victims + self.frozen + self.doubters:
            self._arm(spec)
        loop.rank_main(spec)

    def _strike(self, spec: RankSpec) -> None:
        if spec.rank in self.victims:
            os.kill(os.getpid(), signal.SIGKILL)
        if spec.rank in self.frozen:
            os.kill(os.getpid(), signal.SIGSTOP)
        raise PeerLost("sabotage")

    def _arm(self, spec: RankSpec) -> None:
        struck: list[int] = []

        def strike(is_now: bool = True) -> None:
            if is_now and not struck:
                struck.append(1)
                self._strike(spec)

        match self.moment:
            case Moment.AT_START:
                strike()
            case Moment.IN_STEP_BEFORE_VOTE | Moment.IN_STEP_AFTER_VOTE:
                self._around_vote(
                    lambda r: strike(r.pending_layout is None and r.step == self.step)
                )
            case Moment.IN_MOVE_BEFORE_VOTE | Moment.IN_MOVE_AFTER_VOTE:
                self._around_vote(lambda r: strike(r.pending_layout is not None))
            case Moment.IN_PROBE:
                wrap(microbenchmark, "_exchanged", before=lambda *_: strike())
            case Moment.IN_FORMING:
                wrap(elastic.Members, "meet", before=lambda f: strike(f.name != FIRST_GROUP))
            case Moment.IN_CONNECTING:
                wrap(elastic.Members, "meet", after=lambda f: strike(f.name != FIRST_GROUP))
            case Moment.IN_REGROUP_MOVE:
                wrap(resharding, "stage", before=lambda *_: strike())
            case Moment.IN_RESTORE:
                wrap(manager.Checkpoints, "stage", before=lambda *_: strike())
            case Moment.WITH_VERDICT:
                wrap(consensus.Agreement, "_replicate_verdict", before=lambda *_: strike())
            case Moment.AT_END:
                wrap(
                    process_group.InterruptibleProcessGroup,
                    "exchange",
                    after=lambda _, values: strike(values == [1.0]),
                )

    def _around_vote(self, look: Callable[[Rank], None]) -> None:
        if self.moment in (Moment.IN_STEP_AFTER_VOTE, Moment.IN_MOVE_AFTER_VOTE):
            wrap(worker.Rank, "_vote", after=lambda target, **_: look(target))
        else:
            wrap(worker.Rank, "_vote", before=lambda target, **_: look(target))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hasty:
    """Ranks that wait a shorter time for the notices of death that would make them a quorum."""

    quorum_wait_s: float

    def __call__(self, spec: RankSpec) -> None:
        consensus.QUORUM_WAIT_S = self.quorum_wait_s
        loop.rank_main(spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulty:
    """Ranks that obey the fault orders in `faults_dir`, as those of the demo do."""

    faults_dir: str

    def __call__(self, spec: RankSpec) -> None:
        loop.rank_main(replace(spec, faults_dir=self.faults_dir))


@dataclass(frozen=True, slots=True, kw_only=True)
class BadGradient:
    """Rank `victim` finds a gradient that is not finite in `step`; `doubter` then loses the group.

    With a doubter the victim is killed when all votes are in.
    """

    victim: int
    step: int
    doubter: int | None = None

    def __call__(self, spec: RankSpec) -> None:
        if spec.rank == self.victim:
            original = worker.Rank._gradients_are_finite

            def are_finite(self_: Rank) -> bool:
                return original(self_) and self_.step != self.step

            worker.Rank._gradients_are_finite = are_finite  # type: ignore[assignment,method-assign]
        doubters = () if self.doubter is None else (self.doubter,)
        victims = () if self.doubter is None else (self.victim,)
        Sabotage(
            moment=Moment.IN_STEP_AFTER_VOTE, victims=victims, doubters=doubters, step=self.step
        )(spec)


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
        loop.rank_main(spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadCopy:
    """Right after `step`, one bit of rank `victim`'s first expert of `layer` is another."""

    victim: int
    step: int
    layer: int

    def __call__(self, spec: RankSpec) -> None:
        def flip(target: Rank) -> None:
            if target.step == self.step:
                flip_bit(target.model.layers()[self.layer].bank.w1)

        if spec.rank == self.victim:
            wrap(worker.Rank, "_apply_update", after=flip)
        loop.rank_main(spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherText:
    """Rank `victim` has another text to train on."""

    victim: int

    def __call__(self, spec: RankSpec) -> None:
        if spec.rank == self.victim:
            crc = dataset.Corpus.crc
            dataset.Corpus.crc = lambda self_: crc(self_) ^ 1  # type: ignore[method-assign,assignment]
        loop.rank_main(spec)


def flip_bit(tensor: Tensor) -> None:
    """The last bit of its first number: no norm would show it."""
    tensor.data.reshape(-1)[:1].view(torch.uint8)[:1].bitwise_xor_(1)


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
