"""How survivors agree on who they are and how to go on, over the store of the lowest living rank.

Each publishes how far it is. The lowest living rank waits for all members that are not dead, fences
those that stay silent, and writes the verdict once (first one wins); all others read it. A leader
that dies meanwhile is replaced by the next rank. Nobody acts on a verdict before it stands in the
stores of the next nodes, too: if its store dies with its leader, nobody can decide otherwise.
"""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from pacekeeper.core.errors import LostStateError
from pacekeeper.core.layout import Layout
from pacekeeper.core.layout_codec import decode_layout, encode_layout
from pacekeeper.trainer.commit import Phase, Progress, resolve
from pacekeeper.trainer.stores import (
    DEATHS_KEY,
    FINISHED_KEY,
    Stores,
    fence_key,
    parse_ranks,
)

_log = logging.getLogger(__name__)
POLL_S = 0.002
NUM_WITNESSES = 3  # stores that must know a verdict: so many nodes minus one may die at once
PROBE_PERIOD_S = 0.05
SILENCE_GRACE_S = 2.0  # for the others, where a whole timeout has passed in silence already
FENCE_GRACE_S = 5.0  # a fenced rank that can not be seen to die (uninterruptible) is left behind


class Fenced(Exception):
    """The others went on without this rank: it must end."""


class AllDone(Exception):
    """A member has seen that everybody committed the last step: there is nothing to go on with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a survivor publishes: progress, newest generation seen, and its last commit.

    `was_applied`: that commit changed the weights (False: skipped, a gradient was not finite).
    `was_silence`: it left because a member did not answer, not because something broke.
    """

    progress: Progress
    newest_generation: int
    last_loss: float
    was_applied: bool = True
    was_silence: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How the survivors go on.

    `commits`: ranks that commit their open ticket first, as the others did: with `last_loss`,
    applied or skipped.
    """

    layout: Layout
    commits: frozenset[int]
    last_loss: float
    was_applied: bool

    @property
    def members(self) -> tuple[int, ...]:
        return self.layout.ranks


@dataclass(kw_only=True)
class Agreement:
    """One rank's part in agreeing on what follows a broken generation."""

    stores: Stores
    rank: int
    ranks_per_node: int
    timeout_s: float
    known_dead: Callable[[], frozenset[int]]  # what the agent's command slot says

    def dead_among(self, members: tuple[int, ...]) -> set[int]:
        """Members known to be dead: by the agent, by the stores, or with their whole node."""
        dead = {r for r in members if self._node(r) in self.stores.gone}
        dead |= self.known_dead() & set(members)
        home = self._home(members, dead)
        if home is not None:
            dead |= parse_ranks(self.stores.read(home, DEATHS_KEY)) & set(members)
        return dead

    def finish(self, members: tuple[int, ...]) -> None:
        """Say that all members committed the last step; before the fabric is closed."""
        for node in self._witnesses(members, self.dead_among(members)):
            self.stores.append(node, FINISHED_KEY, f"{self.rank},")

    def has_finished_member(self, members: tuple[int, ...]) -> bool:
        """Has a member seen that everybody committed the last step?"""
        home = self._home(members, self.dead_among(members))
        return home is not None and self._is_finished(home, members)

    def is_left(self, generation: int, members: tuple[int, ...]) -> bool:
        """Has a member left `generation`, or is one dead? Then it can not be formed any more."""
        dead = self.dead_among(members)
        home = self._home(members, dead)
        return bool(dead) or home is None or self._text(home, "left", generation) is not None

    def reach(
        self,
        *,
        generation: int,
        members: tuple[int, ...],
        report: Report,
        next_layout: Callable[[bool, frozenset[int], int], Layout],
    ) -> Verdict:
        """Agree on what follows `generation`.

        `next_layout(commits, dead, new_generation)` is asked on the leader only: the layout to go
        on with, given whether the leader itself commits. Raises LostStateError where state has no
        living holder, Fenced where the others went on without this rank, AllDone.
        """
        published: set[int] = set()
        fenced_s: dict[int, float] = {}
        began_s = probe_s = time.monotonic()
        while True:
            dead = self.dead_among(members)
            now_s = time.monotonic()
            dead |= {rank for rank, at_s in fenced_s.items() if now_s - at_s > FENCE_GRACE_S}
            home = self._home(members, dead)
            if self.rank in dead or home is None:
                raise Fenced(f"rank {self.rank} was declared dead")
            if home not in published:
                self.stores.write(home, _key("report", generation, self.rank), _pack(report))
                self.stores.write(home, _key("left", generation), "1")
                published.add(home)
                continue  # writing may have shown that the home is gone
            if self._is_finished(home, members):
                raise AllDone
            text = self._text(home, "verdict", generation)
            if text is not None:
                return self._read_verdict(self._witness(text, generation, members, dead))
            living = [rank for rank in members if rank not in dead]
            if self.rank == living[0] or now_s - began_s > SILENCE_GRACE_S:
                reports = self._gather(home, generation, living)
                if self.rank == living[0] and len(reports) == len(living):
                    verdict = self._decide(reports, frozenset(dead), next_layout)
                    self.stores.write_first(home, _key("verdict", generation), verdict)
                    continue
                # The lowest that answers speaks for all: the lowest of all may be the silent one.
                speaks = self.rank == min(reports, default=None)
                missing = set(living) - set(reports)
                if speaks and now_s > probe_s:
                    probe_s = now_s + PROBE_PERIOD_S
                    self._probe(missing)
                if speaks and now_s - began_s > self._patience_s(reports):
                    for silent in missing - set(fenced_s):
                        _log.warning("rank=%d does not answer and is fenced", silent)
                        self.stores.write(self._node(silent), fence_key(silent), "silent")
                        fenced_s[silent] = now_s
            time.sleep(POLL_S)

    def _probe(self, missing: set[int]) -> None:
        """Ask the missing ranks' nodes for anything: a node that died as a whole tells nobody."""
        for node in sorted({self._node(rank) for rank in missing}):
            self.stores.read(node, DEATHS_KEY)

    def _patience_s(self, reports: dict[int, Report]) -> float:
        """Who lives has noticed within milliseconds, or at the end of what it computes."""
        if any(report.was_silence for report in reports.values()):
            return min(self.timeout_s, SILENCE_GRACE_S)
        return self.timeout_s

    def _witness(self, text: str, generation: int, members: tuple[int, ...], dead: set[int]) -> str:
        """Put a verdict into the next stores, in order; the one that stands in the last one.

        Whoever could decide otherwise, since the first store is gone, uses one of these.
        """
        for node in self._witnesses(members, dead):
            text = self.stores.write_first(node, _key("verdict", generation), text) or text
        return text

    def _witnesses(self, members: tuple[int, ...], dead: set[int]) -> list[int]:
        nodes = sorted({self._node(rank) for rank in members if rank not in dead})
        return [node for node in nodes if self.stores.client(node) is not None][:NUM_WITNESSES]

    def _is_finished(self, home: int, members: tuple[int, ...]) -> bool:
        return bool(parse_ranks(self.stores.read(home, FINISHED_KEY)) & set(members))

    def _text(self, home: int, what: str, *parts: int) -> str | None:
        return self.stores.read(home, _key(what, *parts))

    def _node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def _home(self, members: tuple[int, ...], dead: set[int]) -> int | None:
        """The node whose store is used: that of the lowest member not known to be dead."""
        for rank in members:
            node = self._node(rank)
            if rank not in dead and self.stores.client(node) is not None:
                return node
        return None

    def _gather(self, home: int, generation: int, living: list[int]) -> dict[int, Report]:
        texts = {r: self._text(home, "report", generation, r) for r in living}
        return {rank: _unpack(text) for rank, text in texts.items() if text is not None}

    def _decide(
        self,
        reports: dict[int, Report],
        dead: frozenset[int],
        next_layout: Callable[[bool, frozenset[int], int], Layout],
    ) -> str:
        commits = resolve({rank: report.progress for rank, report in reports.items()})
        furthest = max(reports.values(), key=lambda r: r.progress.ticket)
        new_generation = max(report.newest_generation for report in reports.values()) + 1
        try:
            layout = next_layout(self.rank in commits, dead, new_generation)
        except LostStateError as error:
            return json.dumps({"lost": str(error)})
        return json.dumps(
            {
                "layout": encode_layout(layout).decode(),
                "commits": sorted(commits),
                "last_loss": furthest.last_loss,
                "was_applied": furthest.was_applied,
            }
        )

    def _read_verdict(self, text: str) -> Verdict:
        document = json.loads(text)
        if "lost" in document:
            raise LostStateError(document["lost"])
        layout = decode_layout(document["layout"].encode())
        if self.rank not in layout.ranks:
            raise Fenced(f"the others went on without rank {self.rank}")
        return Verdict(
            layout=layout,
            commits=frozenset(document["commits"]),
            last_loss=float(document["last_loss"]),
            was_applied=bool(document["was_applied"]),
        )


def _key(what: str, *parts: int) -> str:
    return "/".join([what, *map(str, parts)])


def _pack(report: Report) -> str:
    return json.dumps(
        [
            report.progress.ticket,
            int(report.progress.phase),
            report.newest_generation,
            report.last_loss,
            report.was_applied,
            report.was_silence,
        ]
    )


def _unpack(text: str) -> Report:
    ticket, phase, newest, loss, was_applied, was_silence = json.loads(text)
    return Report(
        progress=Progress(ticket=ticket, phase=Phase(phase)),
        newest_generation=newest,
        last_loss=loss,
        was_applied=was_applied,
        was_silence=was_silence,
    )
