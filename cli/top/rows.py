"""The rows of `pacekeeper top`: which ranks, in which order, in which words.

Nothing is asked or kept here; times are those of this machine's clock on the wall."""

import time
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from rich.text import Text

from pacekeeper.cli.observe.incident_text import column

SLOW, ODD = 1.1, 1.03  # worth a person's eye, or a glance
MOST_ROWS = 200  # on a screen nobody scrolls further; the filter finds the others


class Order(StrEnum):
    """What the ranks are sorted by."""

    SLOWDOWN = "slowdown"
    SUSPICION = "suspicion"
    RANK = "rank"
    NODE = "node"

    @property
    def next(self) -> "Order":
        """The one that the next key press takes."""
        orders = list(Order)
        return orders[(orders.index(self) + 1) % len(orders)]


def chosen(ranks: Sequence[Any], wanted: str, order: Order, *, is_reversed: bool) -> list[Any]:
    """The ranks that match, sorted: what is worst first, or by name.

    `wanted`: words that must all be in rank, node or state; a number alone is a rank.
    """
    words = wanted.lower().split()
    found = [rank for rank in ranks if all(_has(rank, word) for word in words)]
    found.sort(key=lambda rank: _key(rank, order))
    return found[::-1] if is_reversed else found


def _has(rank: Any, word: str) -> bool:
    if word.isdigit():
        return bool(rank.rank == int(word))
    state = f"{rank.state} cordoned" if rank.is_cordoned else rank.state
    return word in rank.node.lower() or word in state


def _key(rank: Any, order: Order) -> tuple[Any, ...]:
    match order:
        case Order.SLOWDOWN:
            slowdown = rank.slowdown if rank.HasField("slowdown") else 0.0
            return (rank.state == "alive", -slowdown, rank.rank)
        case Order.SUSPICION:
            return (-rank.suspicion, rank.rank)
        case Order.RANK:
            return (rank.rank,)
        case Order.NODE:
            return (rank.node, rank.rank)


RANK_HEADS = ("rank", "node", "state", "slowdown", "observed", "expected", "susp.", "batch")
INCIDENT_HEADS = ("#", "kind", "rank", "slow", "opened", "state", "cause")


def rank_cells(rank: Any) -> list[Text]:
    """One row of the table of ranks."""
    is_known = rank.HasField("slowdown")
    state = rank.state + (" cordoned" if rank.is_cordoned else "")
    style = ""
    if rank.state == "dead" or (is_known and rank.slowdown >= SLOW):
        style = "bold red"
    elif rank.state != "alive" or rank.is_cordoned or (is_known and rank.slowdown >= ODD):
        style = "yellow"
    texts = (
        str(rank.rank),
        rank.node,
        state,
        f"x{rank.slowdown:.2f}" if is_known else "measuring",
        f"{rank.observed_s * 1e3:.0f} ms" if rank.HasField("observed_s") else "",
        f"{rank.expected_s * 1e3:.0f} ms" if rank.HasField("expected_s") else "",
        f"{rank.suspicion:.2f}",
        f"{rank.batch_share:.1%}",
    )
    return [
        Text(text, style=style, justify="left" if i in (1, 2) else "right")
        for i, text in enumerate(texts)
    ]


def incident_cells(incident: Any) -> list[Text]:
    """One row of the table of incidents."""
    is_open = not incident.HasField("closed_unix_s")
    texts = (
        str(incident.incident_id),
        incident.kind,
        column(incident),
        "" if incident.kind == "death" else f"x{incident.slowdown:.2f}",
        time.strftime("%H:%M:%S", time.localtime(incident.opened_unix_s)),
        "open" if is_open else f"to {incident.closed_step}",
        incident.cause or incident.reason,
    )
    return [Text(text, style="bold red" if is_open else "dim", no_wrap=True) for text in texts]


def head_text(job: Any, number: int, count: int, orders: Sequence[Any]) -> Text:
    """The first two lines: how the job does, and what it rests on."""
    moving = f" -> {job.desired_generation}" if job.desired_generation != job.generation else ""
    loss = f"  loss {job.loss:.3f}" if job.HasField("loss") else ""
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{job.name}", style="bold")
    text.append(f" ({number + 1} of {count})  ", style="dim")
    text.append(job.watch, style=_WATCH.get(job.watch, "yellow"))
    text.append(
        f"  step {job.step}  {job.step_s * 1e3:.0f} ms  {job.tokens_per_s:,.0f} tokens/s{loss}"
        f"  generation {job.generation}{moving}"
    )
    text.append("\n")
    text.append(job.watch_reason or "", style="dim")
    text.append("\n")
    standing = [*job.orders] or list(orders)
    if job.HasField("proposal") and job.proposal.answer == "waiting":
        gain_s = job.proposal.current_step_s - job.proposal.planned_step_s
        text.append(
            f"plan {job.proposal.proposal_id} waits (a: approve, d: deny): {job.proposal.rung}, "
            f"{gain_s * 1e3:.0f} ms a step",
            style="bold yellow",
        )
    elif standing:
        told = "; ".join(f"{one.kind} {one.subject}".strip() for one in standing)
        text.append(f"ordered: {told}", style="bold magenta")
    else:
        text.append(job.last_decision or "", style="dim")
    return text


_WATCH = {"healthy": "green", "degraded": "bold red", "ended": "dim"}
