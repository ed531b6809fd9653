"""The stall benchmark takes turns, saves what it says, and tells held time from time at all."""

from pathlib import Path
from typing import Any

import pytest
from benchmarks.stall_runs import MODES, run, run_windows

from pacekeeper.core.checkpoint.manifest import CheckpointId
from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.trainer.checkpoint.async_writer import SaveStatus
from pacekeeper.trainer.checkpoint.reader import read_manifest
from pacekeeper.trainer.checkpoint.storage import open_storage
from support.engine_jobs import small_job

pytest.importorskip("transformers")


def saving_job(folder: Path, **own: Any) -> EngineConfig:
    kept = str(folder / "kept")
    return small_job(folder, steps=1000, checkpoint_dir=kept, checkpoint_period_steps=1, **own)


@pytest.mark.parametrize("experts", [0, 1])
def test_each_kind_has_its_turn_and_is_really_saved(tmp_path: Path, experts: int) -> None:
    config = saving_job(tmp_path, experts_per_checkpoint=experts)
    times, rank = run(config, 2)
    assert all(len(times.held_s[mode]) == len(times.next_s[mode]) == 2 for mode in MODES)
    assert rank.checkpoints.counts[SaveStatus.COMPLETE] == 5  # the first, and two rounds of two
    assert len(times.size_bytes) == 2 and min(times.size_bytes) > 0
    storage = open_storage(f"{config.checkpoint_dir}/{config.job}")
    newest = CheckpointId(run_id=1, generation=1, step=rank.step - 1)
    assert bool(read_manifest(storage, newest).older) == bool(experts)


def test_windows_are_saved_step_by_step_and_each_becomes_whole(tmp_path: Path) -> None:
    config = saving_job(tmp_path, checkpoint_window_steps=3)
    turns, rank = run_windows(config, 2)
    assert rank.checkpoints.counts[SaveStatus.COMPLETE] == 3  # the first is not counted
    assert [len(turn.held_s) for turn in turns] == [len(turn.next_s) for turn in turns] == [2] * 3
    assert len(turns[-1].arrive_s) == len(turns[-1].size_bytes) == 2
