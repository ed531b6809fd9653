"""Progress of checkpoints and of in-memory snapshots: the newest complete, what delays the next.

Called by `reports.py` with the save records of a report. Slow or full storage delays no step, so
that only this progress shows it before state is needed. Pure.
"""

from collections.abc import Iterable
from dataclasses import replace

from pacekeeper.controller.state.job_parts import SavedStep, Saves, SaveTrouble
from pacekeeper.core.telemetry.records import SaveRecord

_TROUBLE = {"skipped": SaveTrouble.LATE, "failed": SaveTrouble.FAILED}


def record_saves(saves: Saves | None, records: Iterable[SaveRecord]) -> tuple[Saves | None, str]:
    """Update the progress from records in any order.

    Returns:
        The progress (None where no record ever came) and a log text, empty where nothing changed.
    """
    after = saves
    for record in sorted(records, key=lambda record: (_place(record), record.rank)):
        after = _taken(after or Saves(), record)
    if after is None or (saves or Saves()).trouble == after.trouble:
        return after, ""
    step = max(after.complete, after.last)[1]
    return after, f"{after.trouble or 'well'} step={step} {after.reason}".rstrip()


def _place(record: SaveRecord) -> SavedStep:
    return record.generation, record.step


def _taken(saves: Saves, record: SaveRecord) -> Saves:
    place, trouble = _place(record), _TROUBLE.get(record.outcome)
    if trouble is not None:
        is_next = place > max(saves.last, saves.complete)
        is_worse = trouble is SaveTrouble.FAILED is not saves.trouble and place == saves.last
        if not (is_next or is_worse):
            return saves  # a record of another rank on the same checkpoint, or of an old one
        is_new = trouble != saves.trouble
        return replace(
            saves,
            trouble=trouble,
            reason=f"rank {record.rank}: {record.reason}" if is_new else saves.reason,
            since_step=saves.since_step if saves.missed else record.step,
            last=place,
            missed=saves.missed + is_next,
        )
    if record.outcome != "complete" or place <= saves.complete:
        return saves
    if place < saves.last:  # it is usable, though a later one failed
        return replace(saves, complete=place, duration_s=record.duration_s)
    return Saves(complete=place, duration_s=record.duration_s)
