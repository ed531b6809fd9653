"""Whom an incident is about, in words: one rank, or all that died."""

import time
from collections.abc import Iterator
from typing import Any

from pacekeeper.core.incidents.rank_failures import nodes_label, plural_reason, ranks_label
from pacekeeper.core.incidents.rank_ranges import RankRanges, count_ranks, merge_ranges

SHOWN_MOMENTS = 12  # of deaths, in a terminal
SHOWN_NODES = 2


def ranks_of_incident(incident: Any) -> RankRanges:
    """As runs; none: it is nobody's in particular."""
    if incident.deaths:
        return merge_ranges(run for one in incident.deaths for run in runs_of_deaths(one))
    return ((incident.rank, incident.rank),) if incident.HasField("rank") else ()


def runs_of_deaths(deaths: Any) -> RankRanges:
    """Those of one moment."""
    return tuple((run.first, run.last) for run in deaths.ranks)


def subject(incident: Any) -> str:
    """`rank 3 on gpu-0`, `ranks 0-15 on gpu-0 and gpu-1`; empty: nobody's."""
    runs = ranks_of_incident(incident)
    nodes = nodes_label(incident.nodes[:SHOWN_NODES], incident.num_nodes) or incident.node
    return f"{ranks_label(runs)} on {nodes or '?'}" if runs else ""


def column(incident: Any) -> str:
    """Its ranks for a narrow column."""
    runs = ranks_of_incident(incident)
    if len(runs) > 1:
        return f"{count_ranks(runs):,} ranks"
    return "".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def who_died(incident: Any) -> Iterator[str]:
    """A line for each moment: when, who, why, and whether the job goes on without them."""
    for one in incident.deaths[:SHOWN_MOMENTS]:
        at = time.strftime("%H:%M:%S", time.localtime(one.unix_s))
        runs = runs_of_deaths(one)
        reason = one.reason if count_ranks(runs) == 1 else plural_reason(one.reason)
        since = f"over at step {one.closed_step}" if one.HasField("closed_step") else "open"
        yield f"{at} step {one.step}: {ranks_label(runs)}: {reason}; {since}"
    if (more := len(incident.deaths) - SHOWN_MOMENTS) > 0:
        yield f"and at {more} moments more (--json has all)"
