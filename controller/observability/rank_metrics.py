"""`pacekeeper_rank_info`, which joins ranks with nodes and devices: one series per live rank.

Every other series names a rank, a node or a device alone; what runs where is asked of this one
(`* on (UUID) group_left (job_name, rank) pacekeeper_rank_info`). It is by far the longest page of a
fleet, and hardly ever changes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pacekeeper.controller.state.state import JobState, RankStatus
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.prometheus_text import MetricFamily, MetricsPage
from pacekeeper.core.telemetry.attachment import Attachment

RANK_INFO = MetricFamily(
    "pacekeeper_rank_info",
    "1 for each live rank: its node, device, and its stage and pipeline in the current layout.",
    *("job_name", "rank", "node", "UUID", "role", "stage", "pipeline"),
)
_Place = tuple[str, str]
_NOWHERE = ("", "")


@dataclass(frozen=True, slots=True)
class _Known:
    attachment: Attachment
    node: str
    line: str


@dataclass(frozen=True, slots=True)
class _Job:
    layout: Layout | None
    places: Mapping[int, _Place]
    ranks: Mapping[int, _Known]


class RankInfoSeries:
    """Caches the rendered line of each rank."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}

    def write(self, page: MetricsPage, jobs: Mapping[str, JobState]) -> None:
        """Write the lines of all jobs; only those of changed ranks and layouts are rendered."""
        lines = page.lines_of(RANK_INFO)
        kept: dict[str, _Job] = {}
        for name, job in jobs.items():
            kept[name] = fresh = self._job(name, job)
            lines += [known.line for known in fresh.ranks.values()]
        self._jobs = kept

    def _job(self, name: str, job: JobState) -> _Job:
        before = self._jobs.get(name)
        if before is None or before.layout is not job.layouts.current:
            before = _Job(job.layouts.current, _places(job.layouts.current), {})
        ranks: dict[int, _Known] = {}
        for number, rank in job.ranks.items():
            if rank.status is not RankStatus.ALIVE:
                continue
            known = before.ranks.get(number)
            attachment = rank.attachment
            if known is None or known.attachment is not attachment or known.node != rank.node:
                stage, pipeline = before.places.get(number, _NOWHERE)
                labels = (name, str(number), rank.node, attachment.device_uuid, attachment.role)
                line = RANK_INFO.line_once(1.0, *labels, stage, pipeline)
                known = _Known(attachment, rank.node, line)
            ranks[number] = known
        return _Job(before.layout, before.places, ranks)


def _places(layout: Layout | None) -> dict[int, _Place]:
    """(stage, pipeline) of each working rank, as text."""
    if layout is None:
        return {}
    return {rank: (str(stage), str(pipeline)) for rank, (stage, pipeline) in layout.places.items()}
