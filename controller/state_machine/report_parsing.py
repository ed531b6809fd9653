"""What many nodes report at once, job by job: work of one job's ranks is one piece of news. Pure.

Ranks end a step together, so their nodes tell it together; to take a job up and lay it down again
costs far more than a record. Within a job the order stays; jobs know nothing of each other.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from pacekeeper.controller.state_machine.events import Event, NodeReported, NodesReported
from pacekeeper.core.telemetry.node_report import JobReport
from pacekeeper.core.telemetry.records import ExpertLoadRecord, MicroBatchRecord, StepRecord

Part = tuple[str, JobReport]
"""A node, and what it says of one job."""

_WORK = frozenset((MicroBatchRecord, StepRecord, ExpertLoadRecord))


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
    waiting = list[Part]()
    for node, report in parts:
        is_work = _is_work(report)
        if waiting and not (is_work and report.life == waiting[0][1].life):
            yield _as_one(waiting)
            waiting = []
        if is_work:
            waiting.append((node, report))
        else:
            yield node, report
    if waiting:
        yield _as_one(waiting)


def _as_one(parts: Sequence[Part]) -> Part:
    node, first = parts[0]
    reports = [report for _, report in parts]
    return node, JobReport(
        job=first.job,
        life=first.life,
        records=tuple(chain.from_iterable(report.records for report in reports)),
        micro_batches=tuple(chain.from_iterable(report.micro_batches for report in reports)),
    )


def _is_work(report: JobReport) -> bool:
    if report.attached or report.layouts or not (report.records or report.micro_batches):
        return False
    return _WORK.issuperset(map(type, report.records))
