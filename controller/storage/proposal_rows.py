"""A proposal as a row of the store, and back: prices are columns, layouts their canonical JSON."""

import json
from typing import Any

from pacekeeper.controller.storage.json_columns import LARGE, items, pairs, real, whole
from pacekeeper.core.incidents.findings import Decision, Rung
from pacekeeper.core.incidents.proposals import Answer, Proposal
from pacekeeper.core.layout.codec import decode_layout, encode_layout


def proposal_row(proposal: Proposal) -> tuple[Any, ...]:
    """The columns of the table `proposals`, in their order."""
    decision = proposal.decision
    return (
        proposal.proposal_id,
        proposal.job,
        proposal.answer,
        decision.rung,
        decision.reason,
        decision.current_step_s,
        decision.planned_step_s,
        decision.fluid_step_s,
        decision.cost_s,
        decision.moved_bytes,
        encode_layout(proposal.plan),
        encode_layout(proposal.base),
        json.dumps(sorted(proposal.slow.items())),
        json.dumps(proposal.incident_ids),
        proposal.made_unix_s,
        proposal.expires_unix_s,
        proposal.said_by,
        proposal.note,
    )


def proposal_of(row: tuple[Any, ...]) -> Proposal:
    """Raises ValueError or TypeError for what is no such row."""
    return Proposal(
        proposal_id=row[0],
        job=row[1],
        answer=Answer(row[2]),
        decision=Decision(
            rung=Rung(row[3]),
            reason=row[4],
            current_step_s=row[5],
            planned_step_s=row[6],
            fluid_step_s=row[7],
            cost_s=row[8],
            moved_bytes=row[9],
            layout=decode_layout(row[10]),
        ),
        base=decode_layout(row[11]),
        slow={whole(rank): real(slowdown) for rank, slowdown in pairs(row[12])},
        incident_ids=tuple(whole(one, LARGE) for one in items(row[13])),
        made_unix_s=row[14],
        expires_unix_s=row[15],
        said_by=row[16],
        note=row[17],
    )
