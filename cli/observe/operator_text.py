"""Text of what operators decide on: proposals (plans awaiting approval) and orders in force.

Used by status, approve, deny, cordon, pause, dry-run and top.
"""

import time
from typing import Any

from pacekeeper.core.text import format_s

_ORDER_TEXTS = {
    "cordon_node": "node {} cordoned",
    "cordon_rank": "rank {} cordoned",
    "pause": "planning paused for job {}",
    "dry_run": "dry run (plans are not offered)",
}


def order_line(order: Any) -> str:
    """Return one line on an order: subject, since when, by whom, reason."""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(order.since_unix_s))
    reason = f": {order.reason}" if order.reason else ""
    text = _ORDER_TEXTS.get(order.kind, f"{{}} {order.kind}").format(order.subject)
    return f"{text} since {since} by {order.operator}{reason}"


def proposal_lines(proposal: Any) -> list[str]:
    """Return the state of a proposal, its forecast, and its reason, one line each."""
    until = time.strftime("%H:%M:%S", time.localtime(proposal.expires_unix_s))
    states = {
        "waiting": f"awaits `pacekeeper approve {proposal.proposal_id}` or `deny` until {until}",
        "approved": f"approved by {proposal.operator}; forecast is being updated",
        "offered": f"approved by {proposal.operator}; offered to the ranks",
    }
    by = f" by {proposal.operator}" if proposal.operator else ""
    note = f": {proposal.note}" if proposal.note else ""
    gain_s = proposal.current_step_s - proposal.planned_step_s
    share = f" ({gain_s / proposal.current_step_s:.1%})" if proposal.current_step_s > 0.0 else ""
    incidents = ", ".join(f"#{number}" for number in proposal.incident_ids)
    state = states.get(proposal.answer, f"{proposal.answer}{by}{note}")
    return [
        f"proposal {proposal.proposal_id} {state}",
        f"    {proposal.level}: generation {proposal.base_generation} -> {proposal.generation}; "
        f"forecast: {format_s(gain_s)} per step saved{share}; applying it costs "
        f"{format_s(proposal.cost_s)} and moves {proposal.moved_bytes / 1e6:,.1f} MB"
        + (f"; for incidents {incidents}" if incidents else ""),
        f"    {proposal.reason}",
    ]
