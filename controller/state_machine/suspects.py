"""Which ranks are more likely to be lost than others, as far as findings say: those of their nodes.

Pure. Trainers save first what only such ranks hold.
"""

from collections.abc import Collection

from pacekeeper.controller.state_machine.state import JobState
from pacekeeper.core.incidents.findings import FindingKind

# What is slow is often about to fail. Slow input and uneven work are nobody's.
ACCUSING = frozenset({FindingKind.DEVICE, FindingKind.LINK, FindingKind.HOST})


def suspects(job: JobState, lemons: Collection[str] = ()) -> tuple[int, ...]:
    """The living ranks on nodes of ranks with an open finding, or on `lemons`, ascending."""
    found = (incident.finding for incident in job.open_incidents)
    accused = {finding.rank for finding in found if finding.kind in ACCUSING}
    if not accused and not lemons:
        return ()
    nodes = {known.node for rank, known in job.ranks.items() if rank in accused}.union(lemons)
    return tuple(rank for rank in job.living if job.ranks[rank].node in nodes)
