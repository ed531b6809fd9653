"""What ranks write into a store when they regroup: each its report, the leader the verdict."""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from pacekeeper.core.errors import LostStateError
from pacekeeper.core.layout.codec import decode_layout, encode_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.shrink import Succession
from pacekeeper.trainer.elastic.heard import flag_of, list_of, rank_of, text_of, understood, whole
from pacekeeper.trainer.elastic.messages import Candidate
from pacekeeper.trainer.elastic.quorum import Group
from pacekeeper.trainer.elastic.two_phase_commit import Phase, Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a survivor publishes: progress, newest generation seen, its step and its last commit.

    `was_applied`: that commit changed the weights (False: skipped, a gradient was not finite).
    `was_silence`: it left because a member did not answer, not because something broke.
    """

    progress: Progress
    newest_generation: int
    last_loss: float
    was_applied: bool = True
    was_silence: bool = False
    step: int = 0

    def encode(self) -> str:
        return json.dumps(
            [
                self.progress.ticket,
                int(self.progress.phase),
                self.newest_generation,
                self.last_loss,
                self.was_applied,
                self.was_silence,
                self.step,
            ]
        )

    @classmethod
    def decode(cls, text: str) -> "Report":
        """Raises VersionError."""
        return understood("other ranks", text, cls._of)

    @classmethod
    def _of(cls, values: Any) -> "Report":
        ticket, phase, newest, loss, was_applied, was_silence, step = values
        return cls(
            progress=Progress(ticket=whole(ticket), phase=Phase(whole(phase))),
            newest_generation=whole(newest),
            last_loss=_loss(loss),
            was_applied=flag_of(was_applied),
            was_silence=flag_of(was_silence),
            step=whole(step),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How the survivors go on.

    `commits`: ranks that commit their open ticket first, as the others did: with `last_loss`,
    applied or skipped. Then all stand at `ticket` and `step`. `restore`: then all go back to the
    first of these checkpoints that all read, or (`only_lost`) take from it what no living rank
    holds. `newcomers` come in; `base` is then the layout that the others come from, in which these
    have no part. `text`: as in the stores.
    """

    group: Group
    layout: Layout
    restore: tuple[str, ...]
    commits: frozenset[int]
    last_loss: float
    was_applied: bool
    ticket: int
    step: int
    text: str
    only_lost: bool = False
    newcomers: tuple[Candidate, ...] = ()
    base: Layout | None = None

    @property
    def members(self) -> tuple[int, ...]:
        return self.layout.ranks


def write_verdict(
    chosen: Succession,
    *,
    commits: Collection[int],
    furthest: Report,
    newcomers: Collection[Candidate],
    base: Layout | None,
) -> str:
    """The text of a verdict, given the report of a rank that none is ahead of."""
    document: dict[str, object] = {
        "layout": encode_layout(chosen.layout).decode(),
        "restore": chosen.restore,
        "only_lost": chosen.only_lost,
        "commits": sorted(commits),
        "last_loss": furthest.last_loss,
        "was_applied": furthest.was_applied,
        "ticket": furthest.progress.ticket,
        "step": furthest.step,
    }
    if newcomers:
        assert base is not None, "newcomers must know what the others hold"
        document["newcomers"] = [asdict(one) for one in newcomers]
        document["base"] = encode_layout(base).decode()
    return json.dumps(document)


def write_lost(error: LostStateError) -> str:
    """The text of the verdict that nobody can go on."""
    return json.dumps({"lost": str(error)})


def read_verdict(group: Group, text: str) -> Verdict:
    """What the agreement of `group` came to.

    Raises LostStateError where nobody can go on, VersionError for what is no verdict.
    """
    return understood("the others", text, lambda document: _verdict(group, document, text))


def _verdict(group: Group, document: Any, text: str) -> Verdict:
    if "lost" in document:
        raise LostStateError(text_of(document["lost"]))
    layout = decode_layout(document["layout"].encode())
    base = document.get("base")
    return Verdict(
        group=group.followed_by(layout.generation, layout.ranks, text),
        layout=layout,
        restore=list_of(text_of, document["restore"]),
        commits=frozenset(list_of(rank_of, document["commits"])),
        last_loss=_loss(document["last_loss"]),
        was_applied=flag_of(document["was_applied"]),
        ticket=whole(document["ticket"]),
        step=whole(document["step"]),
        text=text,
        only_lost=flag_of(document["only_lost"]),
        newcomers=list_of(Candidate.of, document.get("newcomers", [])),
        base=None if base is None else decode_layout(base.encode()),
    )


def _loss(value: Any) -> float:
    """It may be infinite, or no number: then the step was skipped."""
    if type(value) not in (int, float):
        raise TypeError(f"a loss of {value!r:.40}")
    return float(value)
