"""A few trials of the crash benchmark: nothing is wrong, and what is wrong would be told."""

from pathlib import Path

import pytest
from benchmarks import checkpoint_crash
from benchmarks.checkpoint_crash import Bench
from benchmarks.crash_ranks import Where

from pacekeeper.trainer.checkpoint import async_writer
from pacekeeper.trainer.checkpoint.async_writer import Saver, Snapshot


@pytest.mark.parametrize(("experts", "window_steps"), [(0, 1), (1, 1), (0, 3)])
def test_kills_cost_what_was_being_written_only(
    tmp_path: Path, experts: int, window_steps: int
) -> None:
    where = Where(root=str(tmp_path), experts=experts, window_steps=window_steps)
    tally = checkpoint_crash.run(Bench(where=where), ["retention", "torn"], seed=3)
    assert tally.wrong == []
    assert tally.num_verified > 0 and tally.killed_in


def test_a_manifest_before_its_files_would_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one mistake that an order of writes is there to prevent."""

    def hasty(self: Saver, snapshot: Snapshot, so_far: async_writer.Written) -> None:
        write(self, snapshot, so_far)
        path = Path(self._storage.root, snapshot.id.name, f"rank-{self._rank}.safetensors")
        path.write_bytes(path.read_bytes()[:-100])

    write = async_writer.Saver._write
    monkeypatch.setattr(async_writer.Saver, "_write", hasty)
    bench = Bench(where=Where(root=str(tmp_path)))
    assert checkpoint_crash.run(bench, ["retention"], seed=0).wrong
