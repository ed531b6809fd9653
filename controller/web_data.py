"""What the web page's scripts draw: the messages of the status service as columns. No second truth.

Columns, since a fleet has thousands of ranks: names are said once, and values in their order.
"""

import json
import math
from typing import Any

from pacekeeper.controller.history import History
from pacekeeper.controller.state import State
from pacekeeper.controller.views import incident_view, job_view, node_views
from pacekeeper.core.layout import Layout
from pacekeeper.core.layout_codec import encode_layout
from pacekeeper.protos.plain import as_dict

STATES = ("alive", "silent", "dead", "finished", "unknown")


def fleet(state: State) -> dict[str, Any]:
    """Every rank of every job, by node."""
    jobs = []
    for name in sorted(state.jobs):
        view = job_view(state, state.jobs[name])
        nodes = sorted({rank.node for rank in view.ranks})
        place = {node: i for i, node in enumerate(nodes)}
        ranks = sorted(view.ranks, key=lambda rank: (rank.node, rank.rank))
        jobs.append(
            {
                "name": name,
                "watch": view.watch,
                "nodes": nodes,
                "rank": [rank.rank for rank in ranks],
                "node": [place[rank.node] for rank in ranks],
                "state": [STATES.index(rank.state) for rank in ranks],
                "slowdown": [
                    round(rank.slowdown, 3) if rank.HasField("slowdown") else None for rank in ranks
                ],
                "suspicion": [round(rank.suspicion, 2) for rank in ranks],
                "cordoned": [int(rank.is_cordoned) for rank in ranks],
            }
        )
    return {"states": STATES, "jobs": jobs}


def job(state: State, history: History, name: str) -> dict[str, Any]:
    """A job's pace, and its incidents as spans of time."""
    incidents = [incident_view(state, incident) for incident in state.jobs[name].incidents]
    pace = history.pace(name)
    return {
        "pace": {
            "step": [row.step for row in pace],
            "unix_s": [row.unix_s for row in pace],
            "num_steps": [row.num_steps for row in pace],
            "generation": [row.generation for row in pace],
            "step_s": [_number(row.step_s) for row in pace],
            "tokens_per_s": [_number(row.tokens_per_s) for row in pace],
            "slowest": [_number(row.slowest) for row in pace],
        },
        "incidents": [
            {
                "incident_id": one.incident_id,
                "kind": one.kind,
                "rank": one.rank if one.HasField("rank") else None,
                "opened_unix_s": one.opened_unix_s,
                "closed_unix_s": one.closed_unix_s if one.HasField("closed_unix_s") else None,
            }
            for one in incidents
        ],
    }


def layout(found: Layout, reason: str, state: State, name: str) -> dict[str, Any]:
    """A layout as it is sent to ranks, with who its ranks are."""
    known = state.jobs[name].ranks
    return {
        "reason": reason,
        "layout": json.loads(encode_layout(found)),
        "ranks": {
            rank: {"node": known[rank].node, "slowdown": _number(known[rank].slowdown)}
            for rank in found.ranks
            if rank in known
        },
    }


def jobs_of(state: State) -> list[dict[str, Any]]:
    """Jobs for a table: all but their ranks."""
    return [_without_ranks(job_view(state, state.jobs[name])) for name in sorted(state.jobs)]


def job_and_ranks(
    state: State, name: str, most: int
) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """One job for a page, and its ranks, the slowest first; None: it is not known any more."""
    if name not in state.jobs:
        return None, []
    view = job_view(state, state.jobs[name])
    order = {one: i for i, one in enumerate(("dead", "silent", "unknown"))}
    ranks = sorted(view.ranks, key=lambda r: (order.get(r.state, 9), -r.slowdown, r.rank))
    shown = [as_dict(rank) for rank in ranks[:most]]
    return _without_ranks(view), shown


def _without_ranks(view: Any) -> dict[str, Any]:
    """A job's message without its ranks, which are counted."""
    counted = {
        "num_ranks": len(view.ranks),
        "num_dead": sum(rank.state == "dead" for rank in view.ranks),
        "num_cordoned": sum(rank.is_cordoned for rank in view.ranks),
    }
    del view.ranks[:]
    return as_dict(view) | counted


def incidents_of(state: State, *, job: str = "", open_only: bool = False) -> list[dict[str, Any]]:
    """Incidents for a table, the newest first."""
    found = [
        incident
        for known in state.jobs.values()
        for incident in known.incidents
        if job in ("", known.name) and (incident.is_open or not open_only)
    ]
    found.sort(key=lambda incident: -incident.incident_id)
    return [as_dict(incident_view(state, incident)) for incident in found]


def nodes_of(state: State) -> list[dict[str, Any]]:
    """Nodes by name, those with something to say first."""
    known = (state.nodes[name] for name in sorted(state.nodes))
    nodes = list(map(as_dict, node_views(state, known)))
    return sorted(nodes, key=lambda node: (node["is_connected"], node["cordon"] is None))


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
