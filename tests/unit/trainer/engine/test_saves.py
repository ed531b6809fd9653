"""Checkpoints of the engine: on any ranks a run goes on from one as if nothing had happened."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from pacekeeper.core.checkpoint import write_plan
from pacekeeper.core.errors import DataError
from pacekeeper.core.layout.layout import BlockKind, Layout
from pacekeeper.trainer.checkpoint.reader import complete_ids, damages, read_manifest
from pacekeeper.trainer.checkpoint.storage import open_storage
from pacekeeper.trainer.engine import export
from pacekeeper.trainer.engine.engine import Engine
from pacekeeper.trainer.model.checkpoint_reader import CheckpointReader
from pacekeeper.trainer.model.skeleton import build_skeleton
from pacekeeper.trainer.parallel.layouts import start_layout
from support.engine_jobs import write_model
from support.engine_saves import (
    SETTINGS,
    Optimizers,
    State,
    adamw,
    assert_all_close,
    assert_all_same,
    layout_of,
    trained,
    two,
)

STEPS = 4
ONE, FOUR = layout_of([0]), layout_of(range(4), replicas=2)


@pytest.fixture(scope="module", autouse=True)
def quick_disk() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)
        patch.setattr(write_plan, "MIN_STRIP_BYTES", 4096)
        yield None


@cache
def undisturbed(ranks: int, optimizers: Optimizers = adamw) -> State:
    return trained(FOUR if ranks == 4 else ONE, STEPS, optimizers=optimizers)[1]


@pytest.mark.parametrize(("ranks", "optimizers"), [(1, adamw), (4, adamw), (4, two)])
def test_on_the_same_layout_it_ends_bit_by_bit_as_the_undisturbed_run(
    tmp_path: Path, ranks: int, optimizers: Optimizers
) -> None:
    layout = FOUR if ranks == 4 else ONE
    trained(layout, 2, directory=tmp_path, optimizers=optimizers)
    began, state = trained(layout, STEPS, directory=tmp_path, optimizers=optimizers, run_id=2)
    assert began == 2
    assert_all_same(state, undisturbed(ranks, optimizers))


def test_no_rank_writes_what_another_writes_and_any_reader_finds_its_names(tmp_path: Path) -> None:
    trained(FOUR, 1, directory=tmp_path)
    storage = open_storage(str(tmp_path / SETTINGS.job))
    (one,) = complete_ids(storage)
    manifest = read_manifest(storage, one)
    assert list(damages(storage, manifest)) == []
    assert any(entry.piece.strips > 1 for entry in manifest.pieces)
    assert {e.piece.kind for e in manifest.pieces} == {"", "optimizer"}
    sizes = [file.size_bytes for file in manifest.files]
    assert len(sizes) == 4 and max(sizes) < 1.2 * sum(sizes) / 4
    safetensors = pytest.importorskip("safetensors")
    names = set()
    for file in manifest.files:
        with safetensors.safe_open(tmp_path / SETTINGS.job / file.name, "pt") as opened:
            names |= set(opened.keys())
            assert all(opened.get_tensor(name).numel() for name in opened.keys())  # noqa: SIM118
    assert "expert.1.3/model.layers.1.mlp.experts.down_proj.exp_avg" in names


@pytest.mark.parametrize("other", [[0], [3, 5, 6]])
def test_on_other_ranks_it_ends_there_up_to_the_order_of_sums(
    tmp_path: Path, other: list[int]
) -> None:
    trained(FOUR, 2, directory=tmp_path)
    began, state = trained(layout_of(other), STEPS, directory=tmp_path, run_id=2)
    assert began == 2
    assert_all_close(state, undisturbed(4), rtol=1e-12)


def test_correction_biases_are_saved_with_the_routers(tmp_path: Path) -> None:
    layout = layout_of([0, 1], layers=(0, 4))
    options: dict[str, Any] = {"family": "deepseek_v3", "bias_rate": 1e-2}
    whole = trained(layout, 3, **options)[1]
    trained(layout, 1, directory=tmp_path, **options)
    began, state = trained(layout, 3, directory=tmp_path, run_id=2, **options)
    assert began == 1
    assert_all_same(state, whole)
    biases = [
        tensor
        for block, tensors in state.items()
        if block.kind is BlockKind.NORM_ROUTER
        for name, tensor in tensors.items()
        if name.endswith("e_score_correction_bias")
    ]
    assert len(biases) == 1 and bool(biases[0].any())


def test_bfloat16_parameters_and_float32_keep_their_types(tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        where = tmp_path / str(dtype)
        trained(ONE, 1, directory=where, dtype=dtype)
        _, state = trained(ONE, 2, directory=where, run_id=2, dtype=dtype)
        assert_all_same(state, trained(ONE, 2, dtype=dtype)[1])


@pytest.mark.parametrize(
    ("family", "killed"), [("qwen3_moe", (2,)), ("qwen3_moe", (5, 2)), ("deepseek_v3", (4,))]
)
def test_a_window_is_replayed_bit_by_bit(
    tmp_path: Path, family: str, killed: tuple[int, ...]
) -> None:
    """Weights of frozen blocks change in no replayed step, and clipping sees their gradients.

    Also where it is killed again, within the replay.
    """
    bias = {"bias_rate": 1e-2} if family == "deepseek_v3" else {}
    layers = (0, 4) if bias else (4, 4)
    layout = layout_of([0, 1], replicas=2, layers=layers)
    config = replace(SETTINGS, checkpoint_window_steps=3)
    options: dict[str, Any] = {"family": family, "max_grad_norm": 0.05, "optimizers": two, **bias}
    for run_id, until in enumerate((*killed, 6), 1):
        began, state = trained(
            layout, until, directory=tmp_path, config=config, run_id=run_id, **options
        )
    assert began == (0 if killed[0] < 3 else 1)
    assert_all_same(state, trained(layout, 6, **options)[1])


def test_a_window_is_replayed_on_other_ranks(tmp_path: Path) -> None:
    config = replace(SETTINGS, checkpoint_window_steps=2)
    trained(FOUR, 2, directory=tmp_path, config=config)
    began, state = trained(layout_of([0, 1]), STEPS, directory=tmp_path, config=config, run_id=2)
    assert began == 1
    assert_all_close(state, undisturbed(4), rtol=1e-12)


@pytest.mark.parametrize("window", [1, 2])
def test_a_job_goes_on_with_other_stages_and_tensor_groups(window: int, tmp_path: Path) -> None:
    shards = {"num_attention_shards": 4, "num_mlp_shards": 2}
    mesh = start_layout([4, 4], range(4), num_stages=2, tensor_size=2, **shards)  # type: ignore[arg-type]
    groups = start_layout([4, 4], range(3), tensor_size=3, **shards)  # type: ignore[arg-type]
    config = replace(SETTINGS, checkpoint_window_steps=window)
    trained(mesh, 2, directory=tmp_path, config=config)
    began, state = trained(groups, STEPS, directory=tmp_path, config=config, run_id=2)
    assert began == 3 - window
    assert_all_close(state, trained(SHARDS, STEPS)[1], rtol=1e-12)


SHARDS = start_layout([4, 4], [0], num_attention_shards=4, num_mlp_shards=2)


@pytest.mark.parametrize("layout", [FOUR, SHARDS], ids=["ranks", "shards"])
def test_the_weights_of_a_saved_step_are_exported_while_the_job_goes_on(
    layout: Layout, tmp_path: Path
) -> None:
    saves, model = tmp_path / "saves", write_model(tmp_path / "model")
    _, state = trained(layout, 2, directory=saves)
    trained(layout, 3, directory=saves, run_id=2)
    storage = open_storage(str(saves / SETTINGS.job))
    one = next(one for one in complete_ids(storage) if one.step == 2)
    with mock.patch.object(export, "build_skeleton", partial(build_skeleton, dtype=torch.float64)):
        manifest = export.export_saved(storage, one, model, tmp_path / "out")
    assert manifest.id.step == 2
    skeleton = build_skeleton(
        tmp_path / "out",
        torch.float64,
        num_attention_shards=layout.num_attention_shards,
        num_mlp_shards=layout.num_mlp_shards,
    )
    read = Engine(skeleton, CheckpointReader(skeleton, tmp_path / "out"))
    assert set(read.layout.blocks()) == set(layout.blocks())
    for block in read.layout.blocks():
        for name, tensor in read.store.read(block).items():
            assert torch.equal(tensor, state[block][name]), (block, name)


def test_what_is_no_step_of_that_model_is_not_exported(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / SETTINGS.job))
    trained(ONE, 4, directory=tmp_path, config=replace(SETTINGS, checkpoint_window_steps=2))
    one = complete_ids(storage)[0]
    other = write_model(tmp_path / "other", num_hidden_layers=1)
    with pytest.raises(DataError, match="spread over 2 steps"):
        export.export_saved(storage, one, other, tmp_path / "out")
    trained(ONE, 6, directory=tmp_path, run_id=2)
    with pytest.raises(DataError, match="is not of the model"):
        export.export_saved(storage, complete_ids(storage)[0], other, tmp_path / "out")
    assert not (tmp_path / "out").exists()
