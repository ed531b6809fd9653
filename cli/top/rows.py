"""Rows, columns and header of `pacekeeper top`: functions of the controller's messages.

Times are in the time zone of this machine.
"""

import time
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from rich.text import Text

from pacekeeper.cli.observe.incident_text import ranks_column
from pacekeeper.core.text import format_s

SLOW, ELEVATED = 1.1, 1.03  # slowdowns shown in red and in yellow
MAX_ROWS = 200  # the filter finds the others


class SortKey(StrEnum):
    """Sort key of the table of ranks."""

    SLOWDOWN = "slowdown"
    SUSPICION = "suspicion"
    RANK = "rank"
    NODE = "node"

    @property
    def next(self) -> "SortKey":
        """Return the key selected by the next key press."""
        keys = list(SortKey)
        return keys[(keys.index(self) + 1) % len(keys)]


def select_ranks(ranks: Sequence[Any], text: str, key: SortKey, *, is_reversed: bool) -> list[Any]:
    """Return the ranks that match a filter, sorted: worst first, or by rank or node.

    Args:
        ranks: `Rank` messages.
        text: words that must each occur in node or state; a number is a rank.
        key: sort key.
        is_reversed: reverse the order.
    """
    words = text.lower().split()
    found = [rank for rank in ranks if all(_matches(rank, word) for word in words)]
    found.sort(key=lambda rank: _sort_value(rank, key))
    return found[::-1] if is_reversed else found


def _matches(rank: Any, word: str) -> bool:
    if word.isdigit():
        return bool(rank.rank == int(word))
    state = f"{rank.state} cordoned" if rank.is_cordoned else rank.state
    return word in rank.node.lower() or word in state


def _sort_value(rank: Any, key: SortKey) -> tuple[Any, ...]:
    match key:
        case SortKey.SLOWDOWN:
            slowdown = rank.slowdown if rank.HasField("slowdown") else 0.0
            return (rank.state == "alive", -slowdown, rank.rank)
        case SortKey.SUSPICION:
            return (-rank.suspicion, rank.rank)
        case SortKey.RANK:
            return (rank.rank,)
        case SortKey.NODE:
            return (rank.node, rank.rank)


RANK_COLUMNS = ("rank", "node", "state", "slowdown", "observed", "expected", "susp.", "batch")
INCIDENT_COLUMNS = ("#", "kind", "rank", "slow", "opened", "state", "cause")


def rank_cells(rank: Any) -> list[Text]:
    """Return one row of the table of ranks."""
    is_known = rank.HasField("slowdown")
    state = rank.state + (" cordoned" if rank.is_cordoned else "")
    style = ""
    if rank.state == "dead" or (is_known and rank.slowdown >= SLOW):
        style = "bold red"
    elif rank.state != "alive" or rank.is_cordoned or (is_known and rank.slowdown >= ELEVATED):
        style = "yellow"
    texts = (
        str(rank.rank),
        rank.node,
        state,
        f"x{rank.slowdown:.2f}" if is_known else "measuring",
        format_s(rank.observed_s) if rank.HasField("observed_s") else "",
        format_s(rank.expected_s) if rank.HasField("expected_s") else "",
        f"{rank.suspicion:.2f}",
        f"{rank.batch_share:.1%}",
    )
    return [
        Text(text, style=style, justify="left" if i in (1, 2) else "right")
        for i, text in enumerate(texts)
    ]


def incident_cells(incident: Any) -> list[Text]:
    """Return one row of the table of incidents."""
    is_open = not incident.HasField("closed_unix_s")
    texts = (
        str(incident.incident_id),
        incident.kind,
        ranks_column(incident),
        "" if incident.kind in ("death", "hang") else f"x{incident.slowdown:.2f}",
        time.strftime("%H:%M:%S", time.localtime(incident.opened_unix_s)),
        "open" if is_open else f"to {incident.closed_step}",
        incident.cause or incident.reason,
    )
    return [Text(text, style="bold red" if is_open else "dim", no_wrap=True) for text in texts]


def header_text(job: Any, number: int, count: int, orders: Sequence[Any]) -> Text:
    """Return the three header lines: job and rates, watch reason, pending proposal or orders."""
    moving = f" -> {job.desired_generation}" if job.desired_generation != job.generation else ""
    loss = f"  loss {job.loss:.3f}" if job.HasField("loss") else ""
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{job.name}", style="bold")
    text.append(f" ({number + 1} of {count})  ", style="dim")
    text.append(job.watch, style=_WATCH.get(job.watch, "yellow"))
    text.append(
        f"  step {job.step}  {format_s(job.step_s)}  {job.tokens_per_s:,.0f} tokens/s{loss}"
        f"  generation {job.generation}{moving}"
    )
    text.append("\n")
    text.append(job.watch_reason or "", style="dim")
    text.append("\n")
    standing = [*job.orders] or list(orders)
    if job.HasField("proposal") and job.proposal.answer == "waiting":
        gain_s = job.proposal.current_step_s - job.proposal.planned_step_s
        text.append(
            f"proposal {job.proposal.proposal_id} awaits approval (a: approve, d: deny): "
            f"{job.proposal.level}, saves {format_s(gain_s)} per step",
            style="bold yellow",
        )
    elif standing:
        listed = "; ".join(f"{one.kind} {one.subject}".strip() for one in standing)
        text.append(f"orders: {listed}", style="bold magenta")
    else:
        text.append(job.last_decision or "", style="dim")
    return text


_WATCH = {"healthy": "green", "degraded": "bold red", "ended": "dim"}
