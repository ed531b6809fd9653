"""Where one rank stands in an elastic job, and its transactions: a step, a move, a restore.

All have the same shape: do the part, reach VOTE, vote, commit. `pending` is what a commit would do;
after a failure the agreement of the survivors may ask for exactly that. How a rank computes, moves
and saves is up to the subclass.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from pacekeeper.core.layout.layout import Layout
from pacekeeper.trainer.checkpoint.manager import Checkpoints
from pacekeeper.trainer.elastic.agreement.quorum import Group
from pacekeeper.trainer.elastic.agreement.two_phase_commit import Phase, Progress
from pacekeeper.trainer.elastic.joining.join_queue import JoinQueue
from pacekeeper.trainer.elastic.launch_spec import RankSpec
from pacekeeper.trainer.hooks.hooks import Hooks

NO_LOSS = float("nan")


@dataclass(kw_only=True)
class Worker(ABC):
    """Everything a rank holds between two failures. Use from one thread.

    Attributes:
        spec: What the process was started with, and what was learnt of nodes that joined.
        layout: The layout in force.
        group: The members; a move may be committed here and still be open elsewhere.
        ticket: Number of the open transaction.
        phase: Of the open transaction.
        step: Steps committed.
        last_loss: Of the last committed step; NaN: of none.
        was_applied: Whether the last commit changed the weights.
        has_entered: Whether a first group stood, and what was to be resumed was.
        is_asked_to_stop: Whether this process was asked to end.
        join_queue: Nodes that wait to join; the leader's.
        pending: What a commit would do.
        pending_layout: The layout that a commit would put in force; None: the commit is of a step.
        hooks: Attachment to the agent of the node, from `attach` on.
        checkpoints: Of this rank.
    """

    spec: RankSpec
    layout: Layout = field(init=False)
    group: Group = field(init=False)
    ticket: int = 0
    phase: Phase = Phase.PRE
    step: int = 0
    last_loss: float = NO_LOSS
    was_applied: bool = True
    has_entered: bool = False
    is_asked_to_stop: Callable[[], bool] = lambda: False
    join_queue: JoinQueue | None = None
    pending: Callable[[], None] | None = None
    pending_layout: Layout | None = None
    hooks: Hooks = field(init=False)
    checkpoints: Checkpoints = field(init=False)

    @property
    def progress(self) -> Progress:
        """How far this rank is."""
        return Progress(ticket=self.ticket, phase=self.phase)

    @abstractmethod
    def on_skipped(self) -> None:
        """Note that a gradient was not finite and nobody updated."""

    @abstractmethod
    def on_step(self, loss: float) -> None:
        """Report the step that was just committed, and count it."""

    def commit(self, *, loss: float, is_applied: bool = True) -> None:
        """Do what is pending, or skip it; the ticket is over. A step counts and is reported."""
        assert self.pending is not None, "a commit follows a vote"
        if is_applied:
            self.checkpoints.settle()
            self.pending()
        else:  # a gradient is not finite somewhere: nobody updates, the step still counts
            self.on_skipped()
        self.was_applied = is_applied
        is_step = self.pending_layout is None
        if self.pending_layout is not None:
            self.layout = self.pending_layout
        self.pending = self.pending_layout = None
        self.ticket += 1
        self.phase = Phase.PRE
        if is_step:
            self.last_loss = loss
            self.on_step(loss)

    def give_up_part(self) -> None:
        """Forget the open ticket's part: it is done again."""
        self.pending = self.pending_layout = None
        self.phase = Phase.PRE
