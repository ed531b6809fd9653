"""Windows: killed after any step and resumed, a run ends bit by bit as if nothing had happened."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.core.checkpoint import write_plan
from pacekeeper.core.checkpoint.manifest import MANIFEST_FILE
from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import BlockKind, Layout
from pacekeeper.trainer.checkpoint.reader import complete_ids, read_manifest
from pacekeeper.trainer.checkpoint.storage import open_storage
from support.examples import examples
from support.trainees import State, assert_all_same, trained

CONFIG = TrainConfig(
    job="window",
    steps=100,
    num_layers=2,
    hidden_size=16,
    num_heads=2,
    expert_hidden_size=16,
    num_experts=4,
    rows_per_step=6,
    row_tokens=32,
    checkpoint_period_steps=1,
    warmup_steps=4,
)
STEPS = 8


def job(ranks: tuple[int, ...] = (0, 1), *, stages: int = 1, tensor: int = 1) -> Layout:
    return even_layout(
        ranks=ranks,
        num_layers=2,
        num_experts=4,
        replicas=min(2, len(ranks) // stages),
        num_virtual_shards=2,
        num_stages=stages,
        tensor_size=tensor,
    )


PIPELINES = job((0, 1, 2, 3), stages=2)


@pytest.fixture(scope="module", autouse=True)
def quick_disk() -> Iterator[None]:
    """What outlives the power is tested elsewhere. Small blocks are cut as large ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr(write_plan, "MIN_STRIP_BYTES", 512)
        yield


@cache
def undisturbed(dtype: str, layout: str = "pair") -> State:
    of = {"pair": job(), "pipelines": PIPELINES, "alone": job((0,))}
    return trained(replace(CONFIG, dtype=dtype), of[layout], STEPS)[1]


def newest_whole(steps: int, window: int) -> int:
    """Where a job killed after `steps` begins again: the first step of the newest whole window."""
    whole = steps // window
    return (whole - 1) * window + 1 if whole else 0


@settings(max_examples=examples(5), deadline=None)
@given(
    window=st.integers(1, 5),
    killed=st.integers(1, STEPS - 1),
    again=st.integers(0, STEPS - 1),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_a_run_killed_twice_ends_bit_by_bit_as_the_undisturbed_one(
    window: int, killed: int, again: int, dtype: str
) -> None:
    """The second time, maybe, while steps of a window are being done again."""
    config = replace(CONFIG, dtype=dtype, checkpoint_window_steps=window)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        trained(config, job(), killed, directory=directory)
        first = newest_whole(killed, window)
        began, _ = trained(config, job(), max(first, again), directory=directory, run_id=2)
        assert began == first
        _, state = trained(config, job(), STEPS, directory=directory, run_id=3)
    assert_all_same(state, undisturbed(dtype))


def test_so_it_does_where_storage_is_slower_than_training(tmp_path: Path) -> None:
    """Steps are copied while earlier ones are being written; the next window waits."""
    config = replace(CONFIG, dtype="float64", checkpoint_window_steps=3)
    trained(config, job(), 7, directory=tmp_path, waits=False)
    began, state = trained(config, job(), STEPS, directory=tmp_path, run_id=2)
    assert began > 0
    assert_all_same(state, undisturbed("float64"))


@pytest.mark.parametrize("ranks", [(0,), (0, 1, 2), (3, 5, 6, 7)])
def test_on_other_ranks_it_ends_there_up_to_the_order_of_sums(
    tmp_path: Path, ranks: tuple[int, ...]
) -> None:
    config = replace(CONFIG, dtype="float64", checkpoint_window_steps=4)
    trained(config, job(), 5, directory=tmp_path)
    began, state = trained(config, job(ranks), STEPS, directory=tmp_path, run_id=2)
    assert began == 1
    assert_close(state, undisturbed("float64"))


def test_pipelines_have_windows_too_and_other_layouts_take_them(tmp_path: Path) -> None:
    """Each stage's blocks by turns; saved by stages, then by tensor groups, then by one rank."""
    config = replace(CONFIG, dtype="float64", checkpoint_window_steps=3, num_stages=2)
    trained(config, PIPELINES, 4, directory=tmp_path)
    shutil.copytree(tmp_path, tmp_path.parent / "copy")
    began, state = trained(config, PIPELINES, STEPS, directory=tmp_path, run_id=2)
    assert began == 1
    assert_all_same(state, undisturbed("float64", "pipelines"))
    copy = tmp_path.parent / "copy"
    groups = job((0, 1, 2, 3), tensor=2)
    began, _ = trained(config, groups, 6, directory=copy, run_id=2)
    assert began == 1
    began, state = trained(config, job((0,)), STEPS, directory=copy, run_id=3)
    assert began == 3, "the second life saved a window from where its replay ended"
    assert_close(state, undisturbed("float64", "alone"))


def test_weights_that_wait_for_their_turn_are_in_strips_of_several_ranks(tmp_path: Path) -> None:
    """As all of these tests have them: else they would say nothing of strips."""
    config = replace(CONFIG, dtype="float64", checkpoint_window_steps=3)
    trained(config, job(), 3, directory=tmp_path)
    storage = open_storage(str(tmp_path / config.job))
    (one,) = complete_ids(storage)
    manifest = read_manifest(storage, one)
    of_head = [e for e in manifest.frozen if e.piece.block.kind is BlockKind.HEAD and e.step == 1]
    assert len(of_head) == of_head[0].piece.strips > 1
    assert {entry.file.rpartition("/")[2] for entry in of_head} == {
        f"step-1-rank-{rank}.safetensors" for rank in (0, 1)
    }


def test_a_window_without_its_manifest_never_counts(tmp_path: Path) -> None:
    """Of the newest everything else is there; the one before is taken."""
    config = replace(CONFIG, dtype="float64", checkpoint_window_steps=3)
    trained(config, job(), 7, directory=tmp_path)
    newest = max(tmp_path.rglob(MANIFEST_FILE))
    assert newest.parent.name.endswith("step00000006")
    newest.unlink()
    began, state = trained(config, job(), STEPS, directory=tmp_path, run_id=2)
    assert began == 1
    assert_all_same(state, undisturbed("float64"))


def assert_close(one: State, other: State) -> None:
    assert one.keys() == other.keys()
    for block, tensors in one.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(
                tensor, other[block][name], rtol=1e-9, atol=1e-12, msg=f"{block} {name}"
            )
