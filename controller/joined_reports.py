"""What many nodes report at once, job by job: work of one job's ranks is one piece of news. Pure.

Ranks end a step together, so their nodes tell it together; to take a job up and lay it down again
costs far more than a record. Within a job the order stays; jobs know nothing of each other.
"""

from collections.abc import Iterable, Iterator

from pacekeeper.controller.events import Event, NodeReported, NodesReported
from pacekeeper.core.records import ExpertLoadRecord, MicroBatchRecord, Record, StepRecord
from pacekeeper.core.reports import JobReport

Part = tuple[str, JobReport]
"""A node, and what it says of one job."""

_WORK = (MicroBatchRecord, StepRecord, ExpertLoadRecord)


def by_job(events: Iterable[NodeReported]) -> Iterator[Part]:
    """The parts of these reports, those of one job one after the other.

    Parts that tell nothing but steps of the same life are joined; they have the first one's node.
    """
    parts: dict[str, list[Part]] = {}
    for event in events:
        for report in event.report.jobs:
            parts.setdefault(report.job, []).append((event.node, report))
    for own in parts.values():
        yield from own if len(own) == 1 else _joined(own)


def together(events: Iterable[Event]) -> Iterator[Event]:
    """The same events, reports that come one after the other as one."""
    reports: list[NodeReported] = []
    for event in events:
        if isinstance(event, NodeReported):
            reports.append(event)
            continue
        if reports:
            yield NodesReported(reports=tuple(reports))
            reports = []
        yield event
    if reports:
        yield NodesReported(reports=tuple(reports))


def _joined(parts: Iterable[Part]) -> Iterator[Part]:
    node, life, records = "", 0, list[Record]()
    job = ""
    for part_node, report in parts:
        is_work = _is_work(report)
        if records and not (is_work and report.life == life):
            yield node, JobReport(job=job, life=life, records=tuple(records))
            records = []
        if not is_work:
            yield part_node, report
        elif records:
            records += report.records
        else:
            node, job, life, records = part_node, report.job, report.life, [*report.records]
    if records:
        yield node, JobReport(job=job, life=life, records=tuple(records))


def _is_work(report: JobReport) -> bool:
    if report.attached or report.layouts or not report.records:
        return False
    return all(isinstance(record, _WORK) for record in report.records)
