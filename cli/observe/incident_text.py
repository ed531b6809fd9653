"""Text of an incident's ranks: one rank, or all that died; for explain, incidents and top."""

import time
from collections.abc import Iterator
from typing import Any

from pacekeeper.core.incidents.rank_failures import nodes_label, plural_reason, ranks_label
from pacekeeper.core.incidents.rank_ranges import RankRanges, count_ranks, merge_ranges

MAX_DEATH_LINES = 12
MAX_NODE_NAMES = 2


def rank_runs(incident: Any) -> RankRanges:
    """Return the ranks of an incident as runs; empty for an incident of the whole job."""
    if incident.deaths:
        return merge_ranges(run for one in incident.deaths for run in runs_of_deaths(one))
    return ((incident.rank, incident.rank),) if incident.HasField("rank") else ()


def runs_of_deaths(deaths: Any) -> RankRanges:
    """Return the ranks that died at one moment as runs."""
    return tuple((run.first, run.last) for run in deaths.ranks)


def ranks_text(incident: Any) -> str:
    """Return `rank 3 on gpu-0` or `ranks 0-15 on gpu-0 and gpu-1`; empty for the whole job."""
    runs = rank_runs(incident)
    nodes = nodes_label(incident.nodes[:MAX_NODE_NAMES], incident.num_nodes) or incident.node
    return f"{ranks_label(runs)} on {nodes or '?'}" if runs else ""


def ranks_column(incident: Any) -> str:
    """Return the ranks for a narrow table column: `3`, `0-15` or `9 ranks`."""
    runs = rank_runs(incident)
    if len(runs) > 1:
        return f"{count_ranks(runs):,} ranks"
    return "".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def death_lines(incident: Any) -> Iterator[str]:
    """Yield one line per moment: time, ranks, reason, step at which the job continued."""
    for one in incident.deaths[:MAX_DEATH_LINES]:
        at = time.strftime("%H:%M:%S", time.localtime(one.unix_s))
        runs = runs_of_deaths(one)
        reason = one.reason if count_ranks(runs) == 1 else plural_reason(one.reason)
        since = f"closed at step {one.closed_step}" if one.HasField("closed_step") else "open"
        yield f"{at} step {one.step}: {ranks_label(runs)}: {reason}; {since}"
    if (more := len(incident.deaths) - MAX_DEATH_LINES) > 0:
        yield f"and {more} more (all with --json)"
