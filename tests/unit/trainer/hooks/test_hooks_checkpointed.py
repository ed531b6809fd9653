"""Any trainer tells what became of its checkpoints; a wrong word stops no training."""

from pathlib import Path

from pacekeeper.core.telemetry.record_codec import CAUSE_BYTES
from pacekeeper.core.telemetry.records import CheckpointRecord, SnapshotRecord
from pacekeeper.trainer.hooks import hooks
from support.rings import records_in


def test_what_became_of_a_checkpoint_is_a_record(tmp_path: Path) -> None:
    pace = hooks.attach(job="j", rank=1, world_size=2, ring_dir=str(tmp_path))
    pace.set_generation(3)
    reason = "No space left on device: " + "\u00e9" * 99
    pace.report_checkpoint(step=9, outcome="failed", duration_s=1.5, size_bytes=7, reason=reason)
    pace.report_checkpoint(step=9, outcome="lost", duration_s=1.5)
    assert pace.ring.path is not None
    (record,) = records_in(pace.ring.path)
    assert isinstance(record, CheckpointRecord)
    assert (record.rank, record.step, record.generation) == (1, 9, 3)
    assert (record.outcome, record.duration_s, record.size_bytes) == ("failed", 1.5, 7)
    assert record.reason and reason.startswith(record.reason)
    assert len(record.reason.encode()) > CAUSE_BYTES - 2, "as much as there is room for"
    assert pace.ring.num_errors == 1, "training goes on"


def test_what_became_of_a_snapshot_is_a_record_of_its_own(tmp_path: Path) -> None:
    pace = hooks.attach(job="j", rank=1, world_size=2, ring_dir=str(tmp_path))
    pace.report_checkpoint(step=9, outcome="skipped", duration_s=0.0, reason="late", in_memory=True)
    assert pace.ring.path is not None
    (record,) = records_in(pace.ring.path)
    assert isinstance(record, SnapshotRecord)
    assert (record.rank, record.step, record.outcome, record.reason) == (1, 9, "skipped", "late")
