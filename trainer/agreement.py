"""How survivors agree on who they are and how to go on, over the store of the lowest living rank.

Each publishes how far it is. The lowest living rank waits for all members that are not dead, fences
those that stay silent, and writes the verdict once (first one wins); all others read it. A leader
that dies meanwhile is replaced by the next rank.
"""

import json
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

POLL_S = 0.002


class Fenced(Exception):
    """The others went on without this rank: it must end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a survivor publishes: progress, newest generation seen, loss of its last commit."""

    progress: Progress
    newest_generation: int
    last_loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How the survivors go on. `commits`: ranks that commit their open ticket first."""

    layout: Layout
    commits: frozenset[int]
    last_loss: float

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

    def has_finished_member(self, members: tuple[int, ...]) -> bool:
        """Did a member end after the last step? Then everybody had committed it."""
        home = self._home(members, self.dead_among(members))
        return home is not None and bool(
            parse_ranks(self.stores.read(home, FINISHED_KEY)) & set(members)
        )

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
        living holder, Fenced where the others went on without this rank.
        """
        published: set[int] = set()
        began_s = time.monotonic()
        while True:
            dead = self.dead_among(members)
            home = self._home(members, dead)
            if self.rank in dead or home is None:
                raise Fenced(f"rank {self.rank} was declared dead")
            if home not in published:
                self.stores.write(home, self._key("report", generation, self.rank), _pack(report))
                published.add(home)
                continue  # writing may have shown that the home is gone
            text = self.stores.read(home, self._key("verdict", generation))
            if text is not None:
                return self._read_verdict(text)
            living = [rank for rank in members if rank not in dead]
            if self.rank == living[0]:
                reports = self._gather(home, generation, living)
                if len(reports) == len(living):
                    verdict = self._decide(reports, frozenset(dead), next_layout)
                    self.stores.write_first(home, self._key("verdict", generation), verdict)
                    continue
                if time.monotonic() - began_s > self.timeout_s:
                    for silent in set(living) - set(reports):
                        self.stores.write(self._node(silent), fence_key(silent), "silent")
            time.sleep(POLL_S)

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
        texts = {r: self.stores.read(home, self._key("report", generation, r)) for r in living}
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
        )

    @staticmethod
    def _key(what: str, *parts: int) -> str:
        return "/".join([what, *map(str, parts)])


def _pack(report: Report) -> str:
    return json.dumps(
        [
            report.progress.ticket,
            int(report.progress.phase),
            report.newest_generation,
            report.last_loss,
        ]
    )


def _unpack(text: str) -> Report:
    ticket, phase, newest, loss = json.loads(text)
    progress = Progress(ticket=ticket, phase=Phase(phase))
    return Report(progress=progress, newest_generation=newest, last_loss=loss)
