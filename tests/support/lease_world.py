"""Members of a lease in a world of one true time: their clocks drift, messages are late or lost,
members are frozen, killed and started again. The store of the record compares and swaps.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import inf
from random import Random

from pacekeeper.controller.ha import lease
from pacekeeper.controller.ha.lease import ElectionMember, Read, Record, Timing, Wait, Write

TIMING = Timing(duration_s=5.0, renew_s=1.0, margin_s=1.0)
DRIFT = 0.1  # rates of two clocks from 0.9 to 1.1: at the edge of what the margin bears


@dataclass(slots=True, kw_only=True)
class Chaos:
    """How the world treats messages and members until `until_s`; afterwards it is kind."""

    until_s: float
    lost_ratio: float = 0.2
    late_s: float = 3.0
    frozen_s: float = 8.0
    killed_ratio: float = 0.3  # of those that are hit, the others are frozen
    hit_every_s: float = 6.0
    resigns_ratio: float = 0.01  # of a leader's turns


@dataclass(slots=True, kw_only=True)
class Node:
    """One member with its clock; `frozen_until_s` in true time."""

    member: ElectionMember
    offset_s: float
    rate: float
    life: int = 0
    frozen_until_s: float = 0.0

    def clock_s(self, true_s: float) -> float:
        return self.offset_s + self.rate * true_s


@dataclass(slots=True)
class World:
    """`leaders` is who might command at each true time that was looked at, with their terms."""

    random: Random
    chaos: Chaos
    num_members: int = 3
    timing: Timing = TIMING
    true_s: float = 0.0
    record: Record | None = None
    nodes: list[Node] = field(default_factory=list)
    led: dict[int, str] = field(default_factory=dict)
    highest: int = 0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _count: int = 0

    def __post_init__(self) -> None:
        for index in range(self.num_members):
            rate = self.random.uniform(1.0 - DRIFT, 1.0 + DRIFT)
            node = Node(
                member=self._born(index, 0), offset_s=self.random.uniform(-1e5, 1e5), rate=rate
            )
            self.nodes.append(node)
            self._at(self.random.uniform(0.0, 1.0), partial(self._run, node, 0))
        self._at(self.random.expovariate(1.0 / self.chaos.hit_every_s), self._hit)

    def play(self, until_s: float) -> Iterator[dict[str, int]]:
        """After each event: who would command at that moment, frozen or not, in which term."""
        while self._events and self._events[0][0] <= until_s:
            self.true_s, _, event = heapq.heappop(self._events)
            event()
            yield self.commanders()
        self.true_s = until_s

    def commanders(self) -> dict[str, int]:
        now = {
            node.member.run_id: lease.active_term(node.member, node.clock_s(self.true_s))
            for node in self.nodes
        }
        return {life: term for life, term in now.items() if term}

    def _born(self, index: int, life: int) -> ElectionMember:
        member = ElectionMember(
            name=f"m{index}", run_id=f"m{index}.{life}", address=f"h{index}:1", timing=self.timing
        )
        return lease.set_eligible(member, -inf)

    def _run(self, node: Node, life: int) -> None:
        """One turn of the member's loop; it waits for its answer before the next."""
        if node.life != life:
            return
        if self.true_s < node.frozen_until_s:
            self._at(node.frozen_until_s, lambda: self._run(node, life))
            return
        now_s = node.clock_s(self.true_s)
        node.member = lease.time_passes(node.member, now_s)
        is_kind = self.true_s > self.chaos.until_s
        is_leading = lease.active_term(node.member, now_s)
        if is_leading and not is_kind and self.random.random() < self.chaos.resigns_ratio:
            node.member = lease.resign(node.member)  # it cannot write, and lets others lead first
            node.member = lease.set_eligible(node.member, now_s + 2.0 * self.timing.duration_s)
        step = lease.next_step(node.member, now_s)
        if isinstance(step, Wait):
            wait_s = min(max(step.until_s - now_s, 0.0) / node.rate, 0.5)
            self._at(self.true_s + wait_s + 1e-3, lambda: self._run(node, life))
            return
        self._exchange(node, step)

    def _exchange(self, node: Node, step: Read | Write) -> None:
        asked, life = self.true_s, node.life

        def arrive() -> None:
            answer = self._store(step)
            back_s = self.true_s + self._delay_s()
            if not self._is_lost():
                self._at(back_s, lambda: self._answered(node, life, step, asked, answer))

        if not self._is_lost():
            self._at(self.true_s + self._delay_s(), arrive)
        self._at(asked + 1.0, lambda: self._timed_out(node, life, step, asked))

    def _store(self, step: Read | Write) -> Record | bool | None:
        if isinstance(step, Write):
            if step.expected != self.record:
                return False
            self.record = step.record
            self.highest = max(self.highest, step.record.term)
            return True
        return self.record

    def _answered(
        self,
        node: Node,
        life: int,
        step: Read | Write,
        asked: float,
        answer: Record | bool | None,
    ) -> None:
        if node.life != life or self._settled.get(id(node), -1.0) >= asked:
            return  # of a life that is over, or given up already
        if self.true_s < node.frozen_until_s:
            again = node.frozen_until_s
            self._at(again, lambda: self._answered(node, life, step, asked, answer))
            return
        self._settled[id(node)] = asked
        now_s = node.clock_s(self.true_s)
        if isinstance(step, Read):
            assert not isinstance(answer, bool)
            node.member = lease.has_read(node.member, answer, now_s)
        elif answer:
            node.member = lease.has_written(node.member, step, now_s)
        else:
            node.member = lease.was_refused(node.member, now_s)
        self._run(node, life)

    def _timed_out(self, node: Node, life: int, step: Read | Write, asked: float) -> None:
        if node.life != life or self._settled.get(id(node), -1.0) >= asked:
            return
        self._settled[id(node)] = asked
        node.member = lease.is_unknown(node.member, step, node.clock_s(self.true_s))
        self._run(node, life)

    _settled: dict[int, float] = field(default_factory=dict)  # by node: question settled last

    def _hit(self) -> None:
        """Something happens to somebody."""
        if self.true_s > self.chaos.until_s:
            return
        node = self.random.choice(self.nodes)
        if self.random.random() < self.chaos.killed_ratio:
            index = self.nodes.index(node)
            node.life += 1
            node.member = self._born(index, node.life)
            node.frozen_until_s = self.true_s + self.random.uniform(0.0, self.chaos.frozen_s)
            life = node.life
            self._at(node.frozen_until_s, lambda: self._run(node, life))
        else:
            node.frozen_until_s = self.true_s + self.random.uniform(0.0, self.chaos.frozen_s)
        self._at(self.true_s + self.random.expovariate(1.0 / self.chaos.hit_every_s), self._hit)

    def _is_lost(self) -> bool:
        is_kind = self.true_s > self.chaos.until_s
        return not is_kind and self.random.random() < self.chaos.lost_ratio

    def _delay_s(self) -> float:
        if self.true_s > self.chaos.until_s:
            return 0.005
        is_late = self.random.random() < 0.2
        return self.random.uniform(0.0, self.chaos.late_s if is_late else 0.05)

    def _at(self, true_s: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (true_s, self._count, event))
