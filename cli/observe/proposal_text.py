"""A proposal in words: what it would gain and cost, and what became of it."""

import time
from typing import Any


def proposal_lines(proposal: Any) -> list[str]:
    """For people; the first line says how it stands."""
    until = time.strftime("%H:%M:%S", time.localtime(proposal.expires_unix_s))
    how = {
        "waiting": f"waits until {until} for `pacekeeper approve {proposal.proposal_id}` or `deny`",
        "approved": f"approved by {proposal.said_by}, being priced again",
        "offered": f"approved by {proposal.said_by}, offered to the ranks",
    }
    by = f" by {proposal.said_by}" if proposal.said_by else ""
    note = f": {proposal.note}" if proposal.note else ""
    gain_s = proposal.current_step_s - proposal.planned_step_s
    part = f" ({gain_s / proposal.current_step_s:.1%})" if proposal.current_step_s > 0.0 else ""
    incidents = ", ".join(f"#{number}" for number in proposal.incident_ids)
    stands = how.get(proposal.answer, f"{proposal.answer}{by}{note}")
    return [
        f"proposal {proposal.proposal_id} {stands}",
        f"    {proposal.rung}: generation {proposal.base_generation} -> {proposal.generation}; by "
        f"forecast {gain_s * 1e3:.0f} ms a step{part}; costs {proposal.cost_s:.1f} s and "
        f"{proposal.moved_bytes / 1e6:,.1f} MB"
        + (f"; for incidents {incidents}" if incidents else ""),
        f"    {proposal.reason}",
    ]
