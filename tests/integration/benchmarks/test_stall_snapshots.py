"""The stall benchmark's snapshots really go to another process."""

from pathlib import Path

import pytest
from benchmarks.stall_runs import run_snapshots

from support.engine_jobs import small_job

pytest.importorskip("transformers")


def test_snapshots_go_to_the_process_of_the_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found = run_snapshots(small_job(tmp_path, snapshot_period_steps=1), 2)
    assert len(found.held_s) == len(found.arrive_s) == 2
    assert min(found.size_bytes) > 0
