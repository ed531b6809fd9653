"""Where one rank stands in an elastic job, and its transactions: a step, a move, a restore.

All have the same shape: do the part, reach VOTE, vote, commit. `pending` is what a commit would do;
after a failure the agreement of the survivors may ask for exactly that. How a rank computes, moves
and saves is up to the subclass.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch._C._distributed_c10d import Store

from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.replica_spread import DomainOf
from pacekeeper.core.layout.shrink import RecoveryPlan, ReplicationFloor
from pacekeeper.trainer.checkpoint.manager import Checkpoints
from pacekeeper.trainer.elastic.agreement.quorum import Group
from pacekeeper.trainer.elastic.agreement.two_phase_commit import Ballot, Phase, Progress
from pacekeeper.trainer.elastic.joining.join_queue import JoinQueue
from pacekeeper.trainer.elastic.launch_spec import RankSpec
from pacekeeper.trainer.groups.waiting import WaitLimits
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

    @property
    @abstractmethod
    def data_crc(self) -> int:
        """What identifies the training data."""

    @abstractmethod
    def floor(self, num_living: int, domain_of: DomainOf) -> ReplicationFloor:
        """Return the replicas that survivors restore of every expert."""

    @abstractmethod
    def attach(self) -> None:
        """Attach to the agent of the node, as a member or nearly one."""

    @abstractmethod
    def form(self, store: Store, limits: WaitLimits, is_aborted: Callable[[], bool]) -> None:
        """Form the process groups of `group`, which meet in `store`. Raises PeerLost."""

    @abstractmethod
    def resume(self) -> None:
        """In the first group: compare the data, restore what is to be resumed. Raises PeerLost."""

    @abstractmethod
    def leave(self) -> None:
        """Leave the process groups, if there are any."""

    @abstractmethod
    def check_groups(self) -> None:
        """Raise PeerLost if a loss in the process groups may have left garbage."""

    @abstractmethod
    def close(self) -> None:
        """End in peace: nobody needs the process groups any more."""

    @abstractmethod
    def finish(self) -> None:
        """After the last step: do what is left to do together; all end together.

        It may be called again after PeerLost, with fewer members.
        """

    @abstractmethod
    def after_step(self) -> None:
        """Do what is due between two steps and changes no state, as an evaluation.

        Raises:
            PeerLost: A member is lost; what was due is left out.
        """

    @abstractmethod
    def take_place(self) -> None:
        """Be ready to train on `layout` in the groups that were formed. Raises PeerLost."""

    @abstractmethod
    def enter(self, *, is_regroup: bool, moved_bytes: int, took_s: float) -> None:
        """Train on `layout` from the current step on; report it."""

    @abstractmethod
    def do_step(self) -> Ballot:
        """Make one optimizer step of the whole job. Raises PeerLost."""

    @abstractmethod
    def do_move(self, new: Layout, restore: Sequence[str] = ()) -> int:
        """Go over to another layout with the present members.

        Args:
            new: The layout.
            restore: Checkpoints; what no member holds comes from the first that all can read.

        Returns:
            Bytes sent and read.

        Raises:
            PeerLost: A member is lost.
            DataError: There is no such checkpoint.
        """

    @abstractmethod
    def do_restore(self, paths: Sequence[str], layout: Layout) -> int:
        """Go back to the first of these checkpoints that all can read; return bytes read.

        Raises:
            PeerLost: A member is lost.
            DataError: There is none.
        """

    @abstractmethod
    def do_probe(self, number: int) -> None:
        """Measure the devices of the present members, once; it changes nothing. Raises PeerLost."""

    @abstractmethod
    def check_replicas(self) -> RecoveryPlan | None:
        """Compare all replicas, and heal those that a majority contradicts.

        Returns:
            How all go back to an earlier state, where replicas differ and none is known to be
            right.

        Raises:
            CorruptStateError: There is no such state.
            PeerLost: A member is lost.
        """

    @abstractmethod
    def save(self, *, is_storing: bool, is_copying: bool = False, is_last: bool = False) -> None:
        """Begin a checkpoint and a snapshot where they are due. Raises PeerLost."""

    @abstractmethod
    def end_saves(self) -> None:
        """Wait for the last checkpoint."""

    @abstractmethod
    def offered_layout(self) -> Layout | None:
        """Return the layout of the plan that this rank has read and accepted, if any."""

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
