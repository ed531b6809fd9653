"""How survivors agree on who they are and how to go on, over the store of the lowest living rank.

Each publishes how far it is. The lowest living rank waits for all members that are not dead, fences
those that stay silent, and writes the verdict once (first one wins); all others read it. A leader
that dies meanwhile is replaced by the next rank. Nobody acts on a verdict before it stands in the
stores of the next nodes, too: if its store dies with its leader, nobody can decide otherwise.

Who is out of sight need not be dead: without a quorum (trainer/elastic/agreement/quorum.py) nobody
decides anything.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice

from pacekeeper.core.errors import LostStateError, NoQuorumError
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.resize.shrink import RecoveryPlan
from pacekeeper.trainer.elastic.agreement.kv_store import (
    DEATHS_KEY,
    FINISHED_KEY,
    Stores,
    fence_key,
    group_key,
    notice,
    parse_notices,
)
from pacekeeper.trainer.elastic.agreement.messages import (
    Candidate,
    ConsensusDecision,
    Report,
    read_verdict,
    write_lost,
    write_verdict,
)
from pacekeeper.trainer.elastic.agreement.quorum import Group, QuorumDecision, decide_quorum
from pacekeeper.trainer.elastic.agreement.two_phase_commit import resolve

GOING_ON_S = 2.0  # at most, to end who is fenced, to form the next group and to move in


GRACE_S = 2.0  # at most, for the others' reports after somebody's silence


ANSWER_S = 5.0  # at most, for one answer of a store that is needed


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureTimeouts:
    """`timeout_s`: until the others train on; all else is part of it."""

    timeout_s: float

    @property
    def resume_s(self) -> float:
        """What is kept for all that follows the fence."""
        return min(GOING_ON_S, self.timeout_s / 4)

    @property
    def fenced_s(self) -> float:
        """Until who has given no sign of life is fenced."""
        return self.timeout_s - self.resume_s

    @property
    def answer_s(self) -> float:
        """For one answer of a store that survivors need: its node is gone then."""
        return min(ANSWER_S, self.fenced_s / 8)

    @property
    def grace_s(self) -> float:
        """For the others to say how far they are, once somebody was silent in a group."""
        return min(GRACE_S, self.fenced_s / 4)

    @property
    def wait_s(self) -> float:
        """For a silent member in a collective, or while a group is formed.

        After it either all can report at once, and one of them is silent; or first the store that
        they report in is, and then those of other nodes, which are all asked together.
        """
        return self.fenced_s - max(self.grace_s, 2.0 * self.answer_s)


_log = logging.getLogger(__name__)
POLL_S = 0.002
NUM_WITNESSES = 3  # stores that must know a verdict: so many nodes minus one may die at once
PROBE_PERIOD_S = 0.05
FENCE_GRACE_S = 5.0  # a fenced rank that can not be seen to die (uninterruptible) is left behind
QUORUM_WAIT_S = 15.0  # for notices of death that would make a side a quorum; then it gives up
_NO_QUORUM_REMEDY = (
    "if the others are a majority they train on and nothing is lost; "
    "if the job has ended everywhere, mend the network and start it again"
)


class Fenced(Exception):
    """The others went on without this rank: it must end."""


class AllDone(Exception):
    """A member has seen that everybody committed the last step: there is nothing to go on with."""


@dataclass(kw_only=True)
class Agreement:
    """One rank's part in agreeing on what follows a broken generation.

    `timeout_s`: from the moment a rank freezes until the others train on, all that follows counted.
    """

    stores: Stores
    rank: int
    node_of: Mapping[int, int]  # the node of each rank, by number
    timeout_s: float
    known_dead: Callable[[], frozenset[int]]  # what the agent's command slot says
    start_s: float = 600.0  # for ranks to come at all: one node may take long to load what it runs

    @property
    def timeouts(self) -> FailureTimeouts:
        """How the time-out is divided."""
        return FailureTimeouts(timeout_s=self.timeout_s)

    def dead_among(self, members: tuple[int, ...]) -> set[int]:
        """Members to go on without: dead for the agent or the stores, or out of sight."""
        return self._dead_and_notices(members)[0]

    def finish(self, group: Group) -> None:
        """Say that all members committed the last step; before the fabric is closed.

        The first one tells the launchers of all nodes, who end what is frozen there.
        """
        dead = self.dead_among(group.members)
        told = self._verdict_nodes(group.members, dead)
        if self.rank == group.members[0]:
            told = sorted({self.node_of[rank] for rank in group.members if rank not in dead})
        for node in told:
            self.stores.append(node, FINISHED_KEY, notice(self.rank, group.name))

    def has_finished_member(self, group: Group) -> bool:
        """Has a member seen that everybody committed the last step?"""
        coordinator = self._coordinator(group.members, self.dead_among(group.members))
        return coordinator is not None and self._is_finished(coordinator, group)

    def is_left(self, group: Group) -> bool:
        """Has a member left `group`, or is one dead? Then nobody need wait in it any more.

        Asked again and again by who waits for members: a store that is silent meanwhile holds
        nobody up, nor is its node gone for that.
        """
        try_get = self.stores.try_get
        dead, _ = self._dead_and_notices(group.members, try_get)
        coordinator = self._coordinator(group.members, dead)
        return (
            bool(dead)
            or coordinator is None
            or try_get(coordinator, _key("left", group)) is not None
        )

    def belong_to(self, group: Group) -> None:
        """Act in `group` from now on. Raises Fenced where that can not be put on record.

        The supervisor's notice must name the group if this rank dies: see
        trainer/elastic/agreement/quorum.py.
        """
        own, key = self.node_of[self.rank], group_key(self.rank)
        self.stores.write(own, key, group.name)
        if self.stores.read(own, key) != group.name:  # a write alone is not waited for
            raise Fenced(f"rank {self.rank} has lost the store of its own node")

    def reach(
        self,
        *,
        group: Group,
        report: Report,
        next_layout: Callable[[bool, frozenset[int], int], RecoveryPlan],
        candidates: Collection[Candidate] = (),
        base: Callable[[bool], Layout] | None = None,
    ) -> ConsensusDecision:
        """Agree on what follows `group`.

        `next_layout(commits, dead, new_generation)` is asked on the leader only: how to go on,
        given whether the leader itself commits. It may count on the ranks of `candidates`, who are
        no members yet; `base` then says, given the same, which layout the members come from.
        Raises LostStateError where state has no living holder, Fenced where the others went on
        without this rank, NoQuorumError where they may have, AllDone.
        """
        published: set[int] = set()
        silence = _Silence(agreement=self, group=group)
        blocked_s: float | None = None
        num_gone = len(self.stores.gone)
        while True:
            dead, deaths = self._dead_and_notices(group.members)
            if len(self.stores.gone) > num_gone:  # where one is out of reach, others may be, too
                self.stores.probe({self.node_of[rank] for rank in group.members})
                num_gone = len(self.stores.gone)
                continue
            now_s = time.monotonic()
            dead |= silence.left_behind(now_s)
            coordinator = self._coordinator(group.members, dead)
            if self.rank in dead or coordinator is None:
                raise Fenced(f"rank {self.rank} was declared dead")
            if coordinator not in published:
                self.stores.write(coordinator, _key("report", group, self.rank), report.encode())
                self.stores.write(coordinator, _key("left", group), "1")
                published.add(coordinator)
                silence.begin_anew()
                continue  # writing may have shown that the home is gone
            if self._is_finished(coordinator, group):
                raise AllDone
            text = self.stores.read(coordinator, _key("verdict", group))
            if text is not None:
                return self._followed(group, self._replicate_verdict(text, group, dead))
            living = [rank for rank in group.members if rank not in dead]
            ruling = self._decide_quorum(group, living, deaths)
            if not ruling.may_continue:
                if blocked_s is None:
                    _log.warning("waits for notices of death: %s", ruling.reason)
                    blocked_s = now_s
                if now_s - blocked_s > QUORUM_WAIT_S:
                    raise NoQuorumError(ruling.reason, remedy=_NO_QUORUM_REMEDY)
                time.sleep(PROBE_PERIOD_S)
                continue
            blocked_s = None
            if self.rank == living[0] or now_s - silence.began_s > self.timeouts.grace_s:
                reports = self._gather(coordinator, group, living)
                if self.rank == living[0] and len(reports) == len(living):
                    verdict = self._decide(reports, frozenset(dead), next_layout, candidates, base)
                    self.stores.write_first(coordinator, _key("verdict", group), verdict)
                    continue
                silence.check(reports, living, deaths)
            time.sleep(POLL_S)

    def _decide_quorum(
        self, group: Group, living: Collection[int], deaths: Mapping[int, str]
    ) -> QuorumDecision:
        """A notice that is not in the coordinator's store yet may be in another store."""
        ruling = decide_quorum(group, living, deaths)
        if ruling.may_continue:
            return ruling
        told = dict(deaths)
        for node in sorted({self.node_of[rank] for rank in group.members} - self.stores.gone):
            told |= self._notices(node)
        return decide_quorum(group, living, told)

    def _dead_and_notices(
        self, members: tuple[int, ...], read: Callable[[int, str], str | None] | None = None
    ) -> tuple[set[int], dict[int, str]]:
        """Members to go on without, and the death notices at the coordinator (by `read`)."""
        dead = {r for r in members if self.node_of[r] in self.stores.gone}
        dead |= self.known_dead() & set(members)
        coordinator = self._coordinator(members, dead)
        deaths = {} if coordinator is None else self._notices(coordinator, read)
        return dead | (set(deaths) & set(members)), deaths

    def _notices(
        self, node: int, read: Callable[[int, str], str | None] | None = None
    ) -> dict[int, str]:
        return parse_notices((read or self.stores.read)(node, DEATHS_KEY))

    def _replicate_verdict(self, text: str, group: Group, dead: set[int]) -> str:
        """Put a verdict into the next stores, in order; the one that stands in the last one.

        Whoever could decide otherwise, since the first store is gone, uses one of these.
        """
        for node in self._verdict_nodes(group.members, dead):
            text = self.stores.write_first(node, _key("verdict", group), text) or text
        return text

    def _verdict_nodes(self, members: tuple[int, ...], dead: set[int]) -> list[int]:
        nodes = sorted({self.node_of[rank] for rank in members if rank not in dead})
        there = (node for node in nodes if self.stores.client(node) is not None)
        return list(islice(there, NUM_WITNESSES))  # who is not needed is not called

    def _is_finished(self, coordinator: int, group: Group) -> bool:
        finished = parse_notices(self.stores.read(coordinator, FINISHED_KEY))
        return any(finished.get(rank) == group.name for rank in group.members)

    def _coordinator(self, members: tuple[int, ...], dead: set[int]) -> int | None:
        """The node whose store is used: that of the lowest member not known to be dead."""
        for rank in members:
            node = self.node_of[rank]
            if rank not in dead and self.stores.client(node) is not None:
                return node
        return None

    def _gather(self, coordinator: int, group: Group, living: list[int]) -> dict[int, Report]:
        texts = {r: self.stores.read(coordinator, _key("report", group, r)) for r in living}
        return {rank: Report.decode(text) for rank, text in texts.items() if text is not None}

    def _decide(
        self,
        reports: dict[int, Report],
        dead: frozenset[int],
        next_layout: Callable[[bool, frozenset[int], int], RecoveryPlan],
        candidates: Collection[Candidate],
        base: Callable[[bool], Layout] | None,
    ) -> str:
        commits = resolve({rank: report.progress for rank, report in reports.items()})
        furthest = max(reports.values(), key=lambda r: r.progress.ticket)
        new_generation = max(report.newest_generation for report in reports.values()) + 1
        try:
            chosen = next_layout(self.rank in commits, dead, new_generation)
        except LostStateError as error:
            return write_lost(error)
        assert not set(chosen.layout.ranks) & dead, "who goes on was counted"
        newcomers = [one for one in candidates if set(one.ranks) <= set(chosen.layout.ranks)]
        return write_verdict(
            chosen,
            commits=commits,
            furthest=furthest,
            newcomers=newcomers,
            base=base(self.rank in commits) if newcomers and base is not None else None,
        )

    def _followed(self, group: Group, text: str) -> ConsensusDecision:
        verdict = read_verdict(group, text)
        if self.rank not in verdict.members:
            raise Fenced(f"the others went on without rank {self.rank}")
        return verdict


@dataclass(kw_only=True)
class _Silence:
    """What a rank does about members that do not answer while it waits for a verdict."""

    agreement: Agreement
    group: Group
    began_s: float = field(default_factory=time.monotonic)
    speaker: int = -1
    spoke_s: float = 0.0  # since when it is the speaker
    probe_s: float = 0.0
    given_up_s: dict[int, float] = field(default_factory=dict)

    def begin_anew(self) -> None:
        """The reports go to another store: who lives must first see that, as this rank has."""
        self.began_s = time.monotonic()
        self.speaker, self.spoke_s = -1, 0.0

    def left_behind(self, now_s: float) -> set[int]:
        """Who was given up, and had its time to be seen dead."""
        return {r for r, at_s in self.given_up_s.items() if now_s - at_s > FENCE_GRACE_S}

    def check(
        self, reports: Mapping[int, Report], living: list[int], deaths: Mapping[int, str]
    ) -> None:
        """Probe and fence, if it is this rank's turn: the lowest that answers speaks for all.

        If it is silent itself from then on, the next one's turn comes.
        """
        mine, now_s = self.agreement, time.monotonic()
        if mine.rank not in reports:
            return
        if self.speaker != min(reports):
            self.speaker = min(reports)
            self.spoke_s = now_s if self.spoke_s else self.began_s
        before = {rank for rank in reports if rank < mine.rank}
        missing = set(living) - set(reports)
        if now_s > self.probe_s:
            # Ask their nodes for anything: a node that died as a whole tells nobody.
            self.probe_s = now_s + PROBE_PERIOD_S * (1 + len(before))
            mine.stores.probe({mine.node_of[rank] for rank in missing})
            if any(mine.node_of[rank] in mine.stores.gone for rank in missing):
                return  # they count as out of sight from now on, not as silent
        patience_s = self._timeout_s(reports)
        turn_s = patience_s + FENCE_GRACE_S + QUORUM_WAIT_S
        if now_s - self.spoke_s <= patience_s + len(before) * turn_s:
            return
        silent = (missing | before) - set(self.given_up_s)
        rest = set(living) - missing - before
        certain = {**deaths, **dict.fromkeys(missing | before, self.group.name)}
        for rank in sorted(silent):
            self.given_up_s[rank] = now_s
            # Who could not go on even then must not end those that might.
            if decide_quorum(self.group, rest, certain).may_continue:
                _log.warning("rank=%d does not answer and is fenced", rank)
                mine.stores.write(mine.node_of[rank], fence_key(rank), "silent")

    def _timeout_s(self, reports: Mapping[int, Report]) -> float:
        """Who lives has noticed within milliseconds, or at the end of what it computes."""
        if any(report.was_silence for report in reports.values()):
            return self.agreement.timeouts.grace_s
        if not any(report.progress.ticket for report in reports.values()):
            return max(
                self.agreement.start_s, self.agreement.timeouts.fenced_s
            )  # it may never have come
        return self.agreement.timeouts.fenced_s


def _key(what: str, group: Group, *parts: int) -> str:
    return "/".join([what, group.name, *map(str, parts)])
