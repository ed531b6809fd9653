"""Values for the web page: tables with search and pages, and data for scripts as columns.

All of them are made from messages of the status service. Columns keep the data of thousands of
ranks small: each name occurs once.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any
from urllib.parse import urlencode

from pacekeeper.controller.api.messages import gone_nodes, incident_view, job_view, node_views
from pacekeeper.controller.api.node_sorting import strikes_by_device
from pacekeeper.controller.observability.timeline import JobRow
from pacekeeper.controller.state.state import State
from pacekeeper.core.incidents.findings import Incident
from pacekeeper.core.incidents.rank_ranges import iter_ranks
from pacekeeper.core.layout.codec import encode_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.protos.convert.plain import message_to_dict

PAGE_ROWS = 100
MAX_SEARCH_CHARS = 200
STATES = ("alive", "silent", "dead", "finished", "unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableQuery:
    """The query of a table.

    Attributes:
        find: Words that each row must contain.
        first: Index of the first row.
        open_only: Whether to show open incidents only.
    """

    find: str = ""
    first: int = 0
    open_only: bool = False

    @classmethod
    def of(cls, query: Mapping[str, str]) -> "TableQuery":
        """Parse the query of a URL; an invalid `first` becomes 0."""
        text = query.get("first", "")
        is_number = text.isascii() and text.isdigit() and len(text) < 9
        return cls(
            find=query.get("find", "")[:MAX_SEARCH_CHARS].strip(),
            first=int(text) if is_number else 0,
            open_only=query.get("open", "") == "1",
        )

    def query(self, first: int | None = None) -> str:
        """The query string, with its question mark; `first`: of another page."""
        values = {
            "find": self.find,
            "open": "1" if self.open_only else "",
            "first": str(self.first if first is None else first),
        }
        given = {name: value for name, value in values.items() if value not in ("", "0")}
        return f"?{urlencode(given)}" if given else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePage:
    """One page of a table; `total`: number of rows that match the query."""

    rows: Sequence[Any]
    first: int
    total: int
    asked: TableQuery

    @property
    def last(self) -> int:
        """Number of the last row, from 1."""
        return self.first + len(self.rows)

    @property
    def before(self) -> str | None:
        """Query of the previous page; None: this is the first."""
        return self.asked.query(max(0, self.first - PAGE_ROWS)) if self.first else None

    @property
    def after(self) -> str | None:
        """Query of the next page; None: this is the last."""
        return self.asked.query(self.last) if self.last < self.total else None


def select_page(
    rows: Iterable[Any], asked: TableQuery, words_of: Callable[[Any], str]
) -> TablePage:
    """The page of a query.

    Args:
        rows: All rows in order.
        asked: The query.
        words_of: The text of a row that is searched.
    """
    words = asked.find.lower().split()
    found = list(rows)
    if words:
        texts = ((row, words_of(row).lower()) for row in found)
        found = [row for row, text in texts if all(word in text for word in words)]
    first = asked.first if asked.first < len(found) else 0
    return TablePage(
        rows=found[first : first + PAGE_ROWS], first=first, total=len(found), asked=asked
    )


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


def job(state: State, rows: Sequence[JobRow], name: str) -> dict[str, Any]:
    """The timeline of a job, and its incidents as spans of time."""
    incidents = [incident_view(state, incident) for incident in state.jobs[name].incidents]
    return {
        "timeline": {
            "step": [row.step for row in rows],
            "unix_s": [row.unix_s for row in rows],
            "num_steps": [row.num_steps for row in rows],
            "generation": [row.generation for row in rows],
            "step_s": [_number(row.step_s) for row in rows],
            "tokens_per_s": [_number(row.tokens_per_s) for row in rows],
            "slowest": [_number(row.slowest) for row in rows],
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
    """A layout in the format of plan files, with node and slowdown of each rank."""
    job = state.jobs[name]
    return {
        "reason": reason,
        "layout": json.loads(encode_layout(found)),
        "ranks": {
            rank: {
                "node": job.ranks[rank].node,
                "slowdown": _number(job.detection.measured.of(rank).slowdown),
            }
            for rank in found.ranks
            if rank in job.ranks
        },
    }


def jobs_of(state: State) -> list[dict[str, Any]]:
    """Jobs for a table, without their ranks."""
    return [_without_ranks(job_view(state, state.jobs[name])) for name in sorted(state.jobs)]


def job_and_ranks(
    state: State, name: str, most: int
) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """One job and its `most` slowest ranks; None: the job is unknown."""
    if name not in state.jobs:
        return None, []
    view = job_view(state, state.jobs[name])
    order = {one: i for i, one in enumerate(("dead", "silent", "unknown"))}
    ranks = sorted(view.ranks, key=lambda r: (order.get(r.state, 9), -r.slowdown, r.rank))
    shown = [message_to_dict(rank) for rank in ranks[:most]]
    return _without_ranks(view), shown


def _without_ranks(view: Any) -> dict[str, Any]:
    """A job's message without its ranks, which are counted."""
    counted = {
        "num_ranks": len(view.ranks),
        "num_dead": sum(rank.state == "dead" for rank in view.ranks),
        "num_cordoned": sum(rank.is_cordoned for rank in view.ranks),
    }
    del view.ranks[:]
    return message_to_dict(view) | counted


def incidents_of(state: State, asked: TableQuery, *, job: str = "") -> TablePage:
    """Incidents for a table, newest first; all of a large fleet take tens of milliseconds."""
    found: list[Incident] = []
    for known in state.jobs.values() if not job else (state.jobs[job],):
        found += known.open_incidents if asked.open_only else known.incidents
    found.sort(key=attrgetter("incident_id"), reverse=True)
    part = select_page(found, asked, lambda incident: _incident_words(state, incident))
    return replace(part, rows=[message_to_dict(incident_view(state, one)) for one in part.rows])


def _incident_words(state: State, incident: Incident) -> str:
    one, job = incident.finding, state.jobs[incident.job]
    rank = "" if one.rank is None else f"rank {one.rank}"
    known = None if one.rank is None else job.ranks.get(one.rank)
    node = "" if known is None else known.node
    dead = (rank for died in incident.rank_failures for rank in iter_ranks(died.ranks))
    words = [f"#{incident.incident_id} {one.kind} {job.name} {rank} {node} {one.tier} {one.cause}"]
    words += [f"rank {rank}" for rank in dead]
    return " ".join([*words, *incident.nodes])


def nodes_of(state: State) -> list[Any]:
    """All nodes by name, then those known by their history only."""
    names = sorted(state.nodes)
    return node_views(state, [*(state.nodes[name] for name in names), *gone_nodes(state)])


def nodes_shown(nodes: Iterable[Any], asked: TableQuery) -> TablePage:
    """Nodes for a table, in the given order."""
    part = select_page(nodes, asked, _node_words)
    return replace(part, rows=[message_to_dict(one) for one in part.rows])


def disconnected_first(nodes: Iterable[Any]) -> list[Any]:
    """Sort nodes: disconnected ones, then cordoned ones, then by name."""
    return sorted(nodes, key=lambda one: (one.is_connected, not one.HasField("cordon")))


def node_and_devices(node: Any) -> dict[str, Any]:
    """One node with the strikes of each of its devices."""
    devices = [
        {"uuid": uuid, "strikes": [message_to_dict(one) for one in strikes]}
        for uuid, strikes in strikes_by_device(node)
    ]
    return message_to_dict(node) | {"devices": devices}


def _node_words(node: Any) -> str:
    """The searchable text of a node."""
    words = [node.name, node.rack, node.product_version, *node.jobs, node.nvml, *node.unreadable]
    words += [] if node.is_connected else ["disconnected"]
    words += ["lemon"] if node.is_lemon else []
    words += ["struck"] if node.strikes else []
    words += (
        ["cordoned", node.cordon.operator, node.cordon.reason] if node.HasField("cordon") else []
    )
    return " ".join([*words, *(one.device_uuid for one in node.strikes)])


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
