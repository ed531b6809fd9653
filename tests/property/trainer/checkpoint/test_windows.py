"""Windows: killed after any step and resumed, a run ends bit by bit as if nothing had happened."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from pacekeeper.core.checkpoint import write_plan
from pacekeeper.core.checkpoint.manifest import MANIFEST_FILE
from pacekeeper.core.config.job import JobConfig
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import BlockKind, Layout
from pacekeeper.trainer.checkpoint.reader import complete_ids, read_manifest
from pacekeeper.trainer.checkpoint.storage import open_storage
from support.examples import examples
from support.trainees import Job, State, assert_all_same

CONFIG = JobConfig(job="window", steps=100, checkpoint_period_steps=1, checkpoint_window_steps=3)
STEPS = 8


def layout_of(ranks: Sequence[int] = (0, 1), stages: int = 1) -> Layout:
    return even_layout(
        ranks=ranks,
        num_layers=2,
        num_experts=4,
        replicas=min(2, len(ranks) // stages),
        num_stages=stages,
    )


PAIR = layout_of()


def trained(
    directory: Path,
    until: int,
    run_id: int = 1,
    *,
    layout: Layout = PAIR,
    window: int = 3,
    waits: bool = True,
) -> tuple[int, State]:
    """Train up to `until` steps; the step it began at, and the state then."""
    config = replace(CONFIG, checkpoint_dir=str(directory), checkpoint_window_steps=window)
    job = Job(config=config, layout=layout, run_id=run_id)
    began = job.step
    job.train(until - began, waits=waits)
    return began, job.state()


@cache
def undisturbed() -> State:
    """On any ranks: the arithmetic is exact."""
    job = Job(config=CONFIG, layout=layout_of([0]))
    job.train(STEPS)
    return job.state()


@pytest.fixture(scope="module", autouse=True)
def quick_disk() -> Iterator[None]:
    """What outlives the power is tested elsewhere. Small blocks are cut as large ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr(write_plan, "MIN_STRIP_BYTES", 512)
        patch.setattr(write_plan, "STRIPS_PER_RANK", 16)
        yield


def newest_whole(steps: int, window: int) -> int:
    """Where a job killed after `steps` begins again: the first step of the newest whole window."""
    whole = steps // window
    return (whole - 1) * window + 1 if whole else 0


@settings(max_examples=examples(8), deadline=None)
@given(
    window=st.integers(1, 5),
    killed=st.integers(1, STEPS - 1),
    again=st.integers(0, STEPS - 1),
    ranks=st.lists(
        st.sampled_from([(0,), (0, 1), (0, 1, 2), (3, 5, 6, 7)]), min_size=3, max_size=3
    ),
)
def test_a_run_killed_twice_ends_bit_by_bit_as_the_undisturbed_one(
    window: int, killed: int, again: int, ranks: list[Sequence[int]]
) -> None:
    """The second time, maybe, while steps of a window are being done again; on any ranks."""
    layouts = [layout_of(some) for some in ranks]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        trained(directory, killed, layout=layouts[0], window=window)
        first = newest_whole(killed, window)
        again = max(first, again)
        began, _ = trained(directory, again, 2, layout=layouts[1], window=window)
        assert began == first
        is_within = first > 0 and first <= again < first + window - 1
        event("killed within a replay" if is_within else "killed elsewhere")
        _, state = trained(directory, STEPS, 3, layout=layouts[2], window=window)
    assert_all_same(state, undisturbed())


@pytest.mark.parametrize("again", [1, 2])
def test_so_does_one_that_is_killed_while_a_window_is_replayed(tmp_path: Path, again: int) -> None:
    trained(tmp_path, 4)
    assert trained(tmp_path, again, 2)[0] == 1
    began, state = trained(tmp_path, STEPS, 3)
    assert began == 1
    assert_all_same(state, undisturbed())


def test_so_it_does_where_storage_is_slower_than_training(tmp_path: Path) -> None:
    """Steps are copied while earlier ones are being written; the next window waits."""
    trained(tmp_path, 7, waits=False)
    began, state = trained(tmp_path, STEPS, 2)
    assert began > 0
    assert_all_same(state, undisturbed())


def test_stages_have_windows_too_and_other_layouts_take_them(tmp_path: Path) -> None:
    """Each stage's blocks by turns; saved by stages, then by all ranks alike, then by one."""
    trained(tmp_path, 4, layout=layout_of(range(4), stages=2))
    began, _ = trained(tmp_path, 6, 2, layout=layout_of(range(4)))
    assert began == 1
    began, state = trained(tmp_path, STEPS, 3, layout=layout_of([0]))
    assert began == 3, "the second life saved a window from where its replay ended"
    assert_all_same(state, undisturbed())


def test_weights_that_wait_for_their_turn_are_in_strips_of_several_ranks(tmp_path: Path) -> None:
    """As all of these tests have them: else they would say nothing of strips."""
    trained(tmp_path, 3)
    storage = open_storage(str(tmp_path / CONFIG.job))
    (one,) = complete_ids(storage)
    manifest = read_manifest(storage, one)
    of_head = [e for e in manifest.frozen if e.piece.block.kind is BlockKind.HEAD and e.step == 1]
    assert len(of_head) == of_head[0].piece.strips > 1
    assert {entry.file.rpartition("/")[2] for entry in of_head} == {
        f"step-1-rank-{rank}.safetensors" for rank in (0, 1)
    }


def test_a_window_without_its_manifest_never_counts(tmp_path: Path) -> None:
    """Of the newest everything else is there; the one before is taken."""
    trained(tmp_path, 7)
    newest = max(tmp_path.rglob(MANIFEST_FILE))
    assert newest.parent.name.endswith("step00000006")
    newest.unlink()
    began, state = trained(tmp_path, STEPS, 2)
    assert began == 1
    assert_all_same(state, undisturbed())
