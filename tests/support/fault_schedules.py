"""Faults by a seed: who is killed, frozen, woken, cut off with its node, or joins, and when. Pure.

Some jobs save checkpoints, of which the newest may be damaged; of these some lose all ranks at once
and are started again by their launchers. That takes all launchers, so no node joins or is lost.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from pacekeeper.core.config.engine import EngineConfig
from support.sabotage import Moment, Sabotage

WORLDS = ((1, 4), (1, 6), (2, 2), (2, 3), (2, 4), (3, 2), (4, 1), (4, 2))  # nodes, ranks on each
PEER_TIMEOUT_S = 6.0  # a rank of eight on two busy cores may wait for seconds
MAX_PAUSE_S = 1.0  # a rank that wakes up so soon is waited for
LAST_STEPS = 2
# Every rank has slots for all experts, so that any plan fits. AdamW amplifies rounding where
# gradients vanish: the larger eps, the less.
SHORT = EngineConfig(
    job="faults",
    steps=40,
    rows_per_step=12,
    row_tokens=24,
    rows_per_microbatch=4,
    learning_rate=1e-3,
    decay="constant",
    slots_per_rank=4,
    device="cpu",
    tick_s=0.05,
)
# Newcomers need seconds to get ready.
LONG = replace(SHORT, steps=90, emulate=True, emulated_step_s=0.05, emulated_noise=False)
GETS_READY_S = 2.5  # about that long
MAX_JOINS = 2
MAX_RESTARTS = 2


class Act(StrEnum):
    KILL = "kill"
    FREEZE = "freeze"
    WAKE = "wake"
    NODE = "kill the node of"  # with its launcher
    PLAN = "offer a plan"
    JOIN = "join with"  # a launcher more, with as many ranks: their numbers are the next ones
    SPOIL = "damage the newest checkpoint"
    ALL = "kill all ranks"  # not their launchers


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One act, `delay_s` after the one before it. `is_awaited`: nothing else is done until the plan
    is followed, however slow the host.
    """

    act: Act
    ranks: tuple[int, ...] = ()
    delay_s: float = 0.0
    is_awaited: bool = False

    def __str__(self) -> str:
        after = f" {self.delay_s:.2f} s later" if self.delay_s else ""
        return f"{self.act} {' and '.join(map(str, self.ranks))}".rstrip() + after


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """Faults that follow each other as they will: the job may not have recovered in between.

    The first one comes at `step` or later, once the job has recovered from all before.
    """

    step: int
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        return f"{self.step}: {', '.join(map(str, self.faults))}"

    @property
    def victims(self) -> frozenset[int]:
        """Who will not live after it."""
        woken = self._of(Act.WAKE)
        return self._of(Act.KILL, Act.FREEZE, Act.NODE) - woken

    def _of(self, *acts: Act) -> frozenset[int]:
        return frozenset(rank for f in self.faults if f.act in acts for rank in f.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A job and what is done to it. `watcher`: a rank that nothing is done to but to all.

    `config` names neither model nor data. `dtype`: "float64" or "float32". `sabotage` strikes its
    victim at one exact moment, if the job comes to it. `is_saving`: with checkpoints.
    """

    name: str
    config: EngineConfig
    dtype: str
    num_nodes: int
    ranks_per_node: int
    watcher: int
    bursts: tuple[Burst, ...]
    sabotage: Sabotage | None = None
    is_saving: bool = False

    def __str__(self) -> str:
        world = f"{self.num_nodes}x{self.ranks_per_node} ranks, {self.config.replicas} replicas"
        if self.is_saving:
            world += f", saving every {self.config.checkpoint_period_steps}"
        struck = ""
        if self.sabotage is not None:
            verb = "kill" if self.sabotage.victims else "freeze"
            (victim,) = self.struck
            struck = f"; {verb} {victim} {self.sabotage.moment.name}"
        return f"{world}, {self.dtype}; {'; '.join(map(str, self.bursts))}{struck}"

    @property
    def struck(self) -> frozenset[int]:
        """Who the sabotage may strike."""
        done = self.sabotage
        return frozenset() if done is None else frozenset(done.victims + done.frozen)


@dataclass(kw_only=True)
class _Drawing:
    """One schedule while it is drawn. `free`: ranks that nothing was done to; `joined`: those of
    each node that joins.
    """

    draw: random.Random
    num_nodes: int
    ranks_per_node: int
    watcher: int
    free: list[int]
    may_join: bool = False
    is_saving: bool = False
    may_restart: bool = False
    sabotage: Sabotage | None = None
    has_lost_node: bool = False  # who is a quorum then must not depend on luck
    joined: list[tuple[int, ...]] = field(default_factory=list)
    num_restarts: int = 0

    def faults(self) -> tuple[Fault, ...]:
        """Those of one burst: at least a plan."""
        kinds: list[Callable[[], tuple[Fault, ...]]] = [self._plan, self._pause]
        if self.free:
            kinds += [self._kill, self._freeze, self._plan_and_kill, self._freeze_and_kill]
        if len(self.free) > 1:
            kinds += [self._two, self._chase, self._freeze_and_kill_another]
            kinds += [] if self.sabotage or self.has_lost_node else [self._moment] * 3
        if self._nodes() and self.sabotage is None and not self.may_restart:
            kinds += [self._node] * 2
        if self.may_join and len(self.joined) < MAX_JOINS:
            kinds += [self._join] * 3
            kinds += [self._join_and_kill] * 4 if len(self.free) > 1 else []
            kinds += [] if self.joined else [self._two_joins] * 2
            kinds += [] if self.sabotage else [self._join_and_go] * 3
        kinds += [self._spoil] if self.is_saving else []
        if self.may_restart and self.sabotage is None and self.num_restarts < MAX_RESTARTS:
            kinds += [self._all] * 5 + [self._spoil_and_all] * 3
        return self.draw.choice(kinds)()

    def _victim(self) -> tuple[int]:
        return (self.free.pop(self.draw.randrange(len(self.free))),)

    def _delay_s(self, limit_s: float) -> float:
        return round(self.draw.uniform(0.0, limit_s), 3)

    def _plan(self) -> tuple[Fault, ...]:
        return (Fault(act=Act.PLAN),)

    def _kill(self) -> tuple[Fault, ...]:
        return (Fault(act=Act.KILL, ranks=self._victim()),)

    def _two(self) -> tuple[Fault, ...]:
        return (Fault(act=Act.KILL, ranks=self._victim() + self._victim()),)

    def _chase(self) -> tuple[Fault, ...]:
        """The second dies while the others recover from the first."""
        second = Fault(act=Act.KILL, ranks=self._victim(), delay_s=self._delay_s(0.4))
        return (*self._kill(), second)

    def _plan_and_kill(self) -> tuple[Fault, ...]:
        victim = Fault(act=Act.KILL, ranks=self._victim(), delay_s=self._delay_s(0.15))
        return (*self._plan(), victim)

    def _freeze(self) -> tuple[Fault, ...]:
        return (Fault(act=Act.FREEZE, ranks=self._victim()),)

    def _freeze_and_kill(self) -> tuple[Fault, ...]:
        """Before it is fenced, or after."""
        (frozen,) = self._freeze()
        return (frozen, replace(frozen, act=Act.KILL, delay_s=self._delay_s(1.2 * PEER_TIMEOUT_S)))

    def _freeze_and_kill_another(self) -> tuple[Fault, ...]:
        delay_s = self._delay_s(1.2 * PEER_TIMEOUT_S)
        killed = Fault(act=Act.KILL, ranks=self._victim(), delay_s=delay_s)
        return (*self._freeze(), killed)

    def _pause(self) -> tuple[Fault, ...]:
        ranks = (self.draw.choice([*self.free, self.watcher]),)
        woken = Fault(act=Act.WAKE, ranks=ranks, delay_s=self._delay_s(MAX_PAUSE_S))
        return (Fault(act=Act.FREEZE, ranks=ranks), woken)

    def _nodes(self) -> list[int]:
        """Nodes that can go: all their ranks are free."""
        every = range(self.num_nodes)
        return [n for n in every if set(self._ranks_of(n)) <= set(self.free)]

    def _ranks_of(self, node: int) -> tuple[int, ...]:
        first = node * self.ranks_per_node
        return tuple(range(first, first + self.ranks_per_node))

    def _node(self) -> tuple[Fault, ...]:
        self.has_lost_node = True
        ranks = self._ranks_of(self.draw.choice(self._nodes()))
        self.free = [rank for rank in self.free if rank not in ranks]
        return (Fault(act=Act.NODE, ranks=ranks),)

    def _join(self) -> tuple[Fault, ...]:
        first = self.num_nodes * self.ranks_per_node + sum(map(len, self.joined))
        ranks = tuple(range(first, first + self.draw.choice((1, 1, 2))))
        self.joined.append(ranks)
        self.free += ranks
        return (Fault(act=Act.JOIN, ranks=ranks),)

    def _two_joins(self) -> tuple[Fault, ...]:
        return (*self._join(), *self._join())

    def _join_and_kill(self) -> tuple[Fault, ...]:
        """A member dies while newcomers get ready, or come in."""
        victim = Fault(act=Act.KILL, ranks=self._victim(), delay_s=self._delay_s(GETS_READY_S))
        return (*self._join(), victim)

    def _join_and_go(self) -> tuple[Fault, ...]:
        """The newcomers' node goes before they are in, or just after."""
        (join,) = self._join()
        self.has_lost_node = True
        self.free = [rank for rank in self.free if rank not in join.ranks]
        gone = Fault(act=Act.NODE, ranks=join.ranks, delay_s=self._delay_s(GETS_READY_S))
        return (join, gone)

    def _spoil(self) -> tuple[Fault, ...]:
        return (Fault(act=Act.SPOIL),)

    def _all(self) -> tuple[Fault, ...]:
        """All live again afterwards, those that died before, too."""
        self.num_restarts += 1
        every = range(self.num_nodes * self.ranks_per_node)
        self.free = [rank for rank in every if rank != self.watcher]
        return (Fault(act=Act.ALL),)

    def _spoil_and_all(self) -> tuple[Fault, ...]:
        return (*self._spoil(), *self._all())

    def _moment(self) -> tuple[Fault, ...]:
        """A rank is struck inside a move, or inside the recovery from another's death."""
        in_move = [Moment.IN_MOVE_BEFORE_VOTE, Moment.IN_MOVE_AFTER_VOTE]
        in_recovery = [
            Moment.IN_FORMING,
            Moment.IN_CONNECTING,
            Moment.IN_REGROUP_MOVE,
            Moment.WITH_VERDICT,
        ]
        moment = self.draw.choice(in_move + in_recovery)
        role = self.draw.choice(["victims", "victims", "frozen"])
        self.sabotage = Sabotage(moment=moment, **{role: self._victim()})  # type: ignore[arg-type]
        return self._plan() if moment in in_move else self._kill()


def drawn(seed: int, number: int) -> Schedule:
    """Schedule `number` of `seed`: one to three bursts on a small job."""
    draw = random.Random(f"{seed}/{number}")
    num_nodes, ranks_per_node = draw.choice(WORLDS)
    may_join = draw.random() < 0.4
    is_saving = draw.random() < 0.5
    may_restart = is_saving and not may_join
    watcher, *free = draw.sample(range(num_nodes * ranks_per_node), num_nodes * ranks_per_node)
    drawing = _Drawing(
        draw=draw,
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        watcher=watcher,
        free=free,
        may_join=may_join,
        is_saving=is_saving,
        may_restart=may_restart,
    )
    config = replace(
        LONG if may_join else SHORT,
        replicas=draw.choice((2, 2, 3)),
        checkpoint_period_steps=draw.choice((1, 3, 5)),
        max_restarts=MAX_RESTARTS if may_restart else 0,
        peer_timeout_s=PEER_TIMEOUT_S,
        replica_check_period_steps=draw.choice((0, 3)),
        checkpoints_kept=4,  # one from before the last check among them
    )
    dtype = "float64" if may_join else draw.choice(("float64", "float64", "float32"))
    bursts, step = [], 0
    for _ in range(draw.randint(1, 3)):
        step += draw.randint(0, 9)
        faults = drawing.faults()
        # Who joins or is started again late finds the job done.
        is_early = any(fault.act in (Act.JOIN, Act.ALL) for fault in faults)
        is_late = draw.random() < 0.15 and not is_early
        at = config.steps - 1 - draw.randint(0, LAST_STEPS) if is_late else step
        bursts.append(Burst(step=at, faults=faults))
        if is_late:
            break
    return Schedule(
        name=f"{seed}/{number}",
        config=config,
        dtype=dtype,
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        watcher=watcher,
        bursts=tuple(bursts),
        sabotage=drawing.sabotage,
        is_saving=is_saving,
    )


def disturbed_run(*, steps: int, dtype: str) -> Schedule:
    """Six ranks on three nodes: moves, deaths and joins in turn, and at once; three are left.

    The first node goes with the leader and the store that the launchers met at.
    """
    plan = Fault(act=Act.PLAN)
    moved = replace(plan, is_awaited=True)
    bursts = (
        (0.05, (moved,)),
        (0.1, (Fault(act=Act.KILL, ranks=(3,)),)),
        (0.15, (Fault(act=Act.JOIN, ranks=(6, 7)),)),
        (0.3, (moved,)),
        (0.35, (Fault(act=Act.NODE, ranks=(0, 1)),)),
        (0.45, (Fault(act=Act.JOIN, ranks=(8,)),)),
        (0.7, (Fault(act=Act.KILL, ranks=(2, 6)),)),
        (0.8, (plan, Fault(act=Act.KILL, ranks=(5,), delay_s=0.05))),
        (0.9, (plan,)),
    )
    return Schedule(
        name="disturbed",
        config=replace(LONG, steps=steps, replicas=3, emulated_step_s=0.1),
        dtype=dtype,
        num_nodes=3,
        ranks_per_node=2,
        watcher=4,
        bursts=tuple(Burst(step=int(at * steps), faults=faults) for at, faults in bursts),
    )
