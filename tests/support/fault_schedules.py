"""Faults by a seed: who is killed, frozen, woken or cut off with its node, and when. Pure."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from pacekeeper.core.config import TrainConfig
from pacekeeper.core.layout import Host, Layout
from support.fleet import SMALL
from support.sabotage import Moment, Sabotage

WORLDS = ((1, 4), (1, 6), (2, 2), (2, 3), (2, 4), (3, 2), (4, 1), (4, 2))  # nodes, ranks on each
PEER_TIMEOUT_S = 4.0
MAX_PAUSE_S = 1.0  # a rank that wakes up so soon is waited for
LAST_STEPS = 2


class Act(StrEnum):
    KILL = "kill"
    FREEZE = "freeze"
    WAKE = "wake"
    NODE = "kill the node of"  # with its launcher
    PLAN = "offer a plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One act, `delay_s` after the one before it."""

    act: Act
    ranks: tuple[int, ...] = ()
    delay_s: float = 0.0

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
        woken = {rank for fault in self.faults if fault.act is Act.WAKE for rank in fault.ranks}
        hit = {rank for fault in self.faults for rank in fault.ranks}
        return frozenset(hit - woken)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A job and what is done to it. `watcher`: a rank that nothing is done to.

    `sabotage` strikes its victim at one exact moment, if the job comes to it.
    """

    name: str
    config: TrainConfig
    num_nodes: int
    ranks_per_node: int
    watcher: int
    bursts: tuple[Burst, ...]
    sabotage: Sabotage | None = None

    def __str__(self) -> str:
        world = f"{self.num_nodes}x{self.ranks_per_node} ranks, {self.config.replicas} replicas"
        struck = ""
        if self.sabotage is not None:
            verb = "kill" if self.sabotage.victims else "freeze"
            (victim,) = self.struck
            struck = f"; {verb} {victim} {self.sabotage.moment.name}"
        return f"{world}, {self.config.dtype}; {'; '.join(map(str, self.bursts))}{struck}"

    @property
    def struck(self) -> frozenset[int]:
        """Who the sabotage may strike."""
        done = self.sabotage
        return frozenset() if done is None else frozenset(done.victims + done.frozen)


@dataclass(kw_only=True)
class _Drawing:
    """One schedule while it is drawn. `free`: ranks that nothing was done to."""

    draw: random.Random
    num_nodes: int
    ranks_per_node: int
    watcher: int
    free: list[int]
    sabotage: Sabotage | None = None
    has_lost_node: bool = False  # who is a quorum then must not depend on luck

    def faults(self) -> tuple[Fault, ...]:
        """Those of one burst: at least a plan."""
        kinds: list[Callable[[], tuple[Fault, ...]]] = [self._plan, self._pause]
        if self.free:
            kinds += [self._kill, self._freeze, self._plan_and_kill, self._freeze_and_kill]
        if len(self.free) > 1:
            kinds += [self._two, self._chase, self._freeze_and_kill_another]
            kinds += [] if self.sabotage or self.has_lost_node else [self._moment] * 3
        if self._nodes() and self.sabotage is None:
            kinds += [self._node] * 2
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
    watcher, *free = draw.sample(range(num_nodes * ranks_per_node), num_nodes * ranks_per_node)
    drawing = _Drawing(
        draw=draw,
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        watcher=watcher,
        free=free,
    )
    config = replace(
        SMALL,
        replicas=draw.choice((2, 2, 3)),
        dtype=draw.choice(("float64", "float64", "float32")),
        peer_timeout_s=PEER_TIMEOUT_S,
        replica_check_period_steps=draw.choice((0, 3)),
    )
    bursts, step = [], 0
    for _ in range(draw.randint(1, 3)):
        step += draw.randint(0, 9)
        is_late = draw.random() < 0.15
        at = config.steps - 1 - draw.randint(0, LAST_STEPS) if is_late else step
        bursts.append(Burst(step=at, faults=drawing.faults()))
        if is_late:
            break
    return Schedule(
        name=f"{seed}/{number}",
        config=config,
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        watcher=watcher,
        bursts=tuple(bursts),
        sabotage=drawing.sabotage,
    )


def disturbed_run(*, steps: int, dtype: str) -> Schedule:
    """Six ranks on two nodes, of which two are left: moves and deaths in turn, and at once."""
    bursts = (
        (0.1, (Fault(act=Act.PLAN),)),
        (0.25, (Fault(act=Act.KILL, ranks=(0,)),)),
        (0.4, (Fault(act=Act.PLAN),)),
        (0.5, (Fault(act=Act.KILL, ranks=(1, 5)),)),
        (0.7, (Fault(act=Act.PLAN), Fault(act=Act.KILL, ranks=(3,), delay_s=0.05))),
        (0.85, (Fault(act=Act.PLAN),)),
    )
    return Schedule(
        name="disturbed",
        config=replace(SMALL, steps=steps, dtype=dtype, replicas=3),
        num_nodes=2,
        ranks_per_node=3,
        watcher=4,
        bursts=tuple(Burst(step=int(at * steps), faults=faults) for at, faults in bursts),
    )


def random_plan(layout: Layout, replicas: int, seed: str) -> Layout:
    """The next generation with other hosts and batch shares, on the same ranks."""
    draw = random.Random(seed)
    number = min(replicas, len(layout.ranks))
    experts = tuple(
        tuple(
            tuple(Host(rank, 1.0 / number) for rank in sorted(draw.sample(layout.ranks, number)))
            for _ in layer
        )
        for layer in layout.experts
    )
    weights = [draw.uniform(0.5, 1.5) for _ in layout.ranks]
    shares = tuple((r, w / sum(weights)) for r, w in zip(layout.ranks, weights, strict=True))
    return replace(
        layout, generation=layout.generation + 1, experts=experts, batch_shares=shares, speeds=()
    )
