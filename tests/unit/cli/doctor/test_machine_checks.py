"""Rings as `pacekeeper doctor` finds them, beside a launch that clears them away."""

from pathlib import Path

import pytest

from pacekeeper.cli.doctor import machine_checks
from pacekeeper.cli.doctor.checks import Health
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.trainer.hooks.ring_writer import Ring


def test_a_ring_that_goes_while_it_is_looked_at_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(2):
        Ring.create(tmp_path, Attachment(job="job", rank=rank, world_size=2, pid=1)).close()
    truly = machine_checks._num_records

    def cleared_before(path: Path) -> int:
        if path.name == "rank-00000.ring":
            path.unlink()
        return truly(path)

    monkeypatch.setattr(machine_checks, "_num_records", cleared_before)
    found = machine_checks.check_rings(tmp_path)
    assert found.health is Health.OK
    assert [int(word) for word in found.found.split() if word.isdigit()] == [1, 0]


def test_one_that_stays_and_is_none_is_damage(tmp_path: Path) -> None:
    Ring.create(tmp_path, Attachment(job="job", rank=0, world_size=2, pid=1)).close()
    (tmp_path / "job" / "rank-00001.ring").symlink_to(tmp_path / "nowhere")
    found = machine_checks.check_rings(tmp_path)
    assert found.health is Health.BROKEN and "rank-00001.ring" in found.found
