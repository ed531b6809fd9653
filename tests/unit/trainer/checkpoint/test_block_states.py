"""Any state is saved and restored, on any ranks: mixed types, empty pieces, owners of moments."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pacekeeper.core.checkpoint import write_plan
from pacekeeper.core.checkpoint.manifest import CheckpointId, Manifest
from pacekeeper.core.config.job import JobConfig
from pacekeeper.core.layout.layout import Block, Layout
from pacekeeper.core.layout.state_owners import assign_state_owners
from pacekeeper.trainer.checkpoint.block_reader import Reader
from pacekeeper.trainer.checkpoint.block_states import blocks_on, read_block
from pacekeeper.trainer.checkpoint.manager import Checkpoints, Position
from pacekeeper.trainer.checkpoint.reader import damages, read_manifest
from pacekeeper.trainer.checkpoint.storage import open_storage
from support.block_states import MixedStates, layout_of

CONFIG = JobConfig(job="mixed", checkpoint_period_steps=1)
ONE = CheckpointId(run_id=1, generation=1, step=1)
State = Mapping[Block, Mapping[str, Tensor]]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_plan, "MIN_STRIP_BYTES", 16)
    monkeypatch.setattr(write_plan, "STRIPS_PER_RANK", 64)


def saved(directory: Path, layout: Layout) -> tuple[Manifest, State]:
    """A checkpoint of all ranks, each of which has the same state; and that state."""
    state: dict[Block, dict[str, Tensor]] = {}
    for rank in layout.ranks:
        states = MixedStates(seed=7)
        for block in blocks_on(layout, rank):
            state[block] = read_block(states, block)
        checkpoints = Checkpoints(
            replace(CONFIG, checkpoint_dir=str(directory)),
            rank=rank,
            run_id=1,
            first_run_id=1,
            identity={},
            states=states,
        )
        at = Position(layout=layout, step=1, ticket=1, last_loss=1.0)
        checkpoints.save_if_due(at, is_storing=False)
        checkpoints.close()
    storage = open_storage(str(directory / CONFIG.job))
    manifest = read_manifest(storage, ONE)
    assert list(damages(storage, manifest)) == []
    return manifest, state


def found(directory: Path, layout: Layout, rank: int) -> State:
    states = MixedStates()
    reader = Reader(rank=rank, storage=None, identity={}, states=states)
    restored = reader.read(str(directory / CONFIG.job / ONE.name), layout, None)
    return restored.state


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name])


@pytest.mark.parametrize("ranks", [[0], [0, 1], [3, 4, 6]])
def test_other_ranks_read_the_same_bits(tmp_path: Path, ranks: Sequence[int]) -> None:
    manifest, state = saved(tmp_path, layout_of([0, 1], replicas=2))
    assert any(entry.piece.strips > 1 for entry in manifest.pieces)
    assert any(not entry.size_bytes for entry in manifest.pieces)
    layout = layout_of(ranks)
    for rank in ranks:
        own = found(tmp_path, layout, rank)
        assert set(own) == set(blocks_on(layout, rank))
        for block, tensors in own.items():
            assert_same(tensors, state[block])


def test_moments_are_written_and_read_by_owners_and_mirrors_only(tmp_path: Path) -> None:
    layout = assign_state_owners(layout_of([0, 1, 2, 3]))
    manifest, state = saved(tmp_path, layout)
    for entry in manifest.pieces:
        writer = int(entry.file.rpartition("rank-")[2].partition(".")[0])
        block = entry.piece.block
        assert writer in (
            layout.state_holders(block) if entry.piece.kind else layout.holders(block)
        )
    for rank in layout.ranks:
        own = found(tmp_path, layout, rank)
        assert set(own) == set(blocks_on(layout, rank))
        for block, tensors in own.items():
            has_moments = rank in layout.state_holders(block)
            specs = [s for s in MixedStates().specs(block) if has_moments or not s.kind]
            assert_same(tensors, {spec.name: state[block][spec.name] for spec in specs})
    assert all(len(layout.state_holders(block)) == 2 for block in layout.owned_blocks())
