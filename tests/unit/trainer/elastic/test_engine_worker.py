"""A worker of one process: what it trains, writes and rejects before the first step."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import ConfigError, DataError, HostError, PacekeeperError
from pacekeeper.core.telemetry.records import MicroBatchRecord
from pacekeeper.trainer.elastic.engine_worker import EngineWorker
from pacekeeper.trainer.elastic.launch_spec import RankSpec
from pacekeeper.trainer.elastic.loop import _advance
from pacekeeper.trainer.emulation.engine_device import EngineDevice
from pacekeeper.trainer.engine import job as job_module
from pacekeeper.trainer.engine.engine import Engine
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.groups.former import Generation
from support.engine_jobs import logged, small_job, write_data, write_model
from support.rank_threads import ThreadGroup, run_ranks
from support.rings import records_in
from support.token_files import write_tokens


def worker_of(config: EngineConfig, folder: Path, groups: EngineGroups, **own: Any) -> EngineWorker:
    """A worker in these groups, before its first step."""
    ranks = groups.control.ranks
    spec = RankSpec(
        config=config,
        rank=groups.control.rank,
        world_size=len(ranks),
        node_of=dict.fromkeys(ranks, 0),
        stores=(),
        ring_dir=str(folder / "rings"),
        run_dir=str(folder / "run"),
        faults_dir=str(folder),
    )
    worker = EngineWorker(spec=spec, **own)
    worker.attach()
    worker._generation = Generation(groups=groups)
    try:
        worker.resume()
        worker.enter(is_regroup=False, moved_bytes=0, took_s=0.0)
    except PacekeeperError:
        worker.hooks.detach()
        raise
    return worker


def run(config: EngineConfig, folder: Path, **own: Any) -> EngineWorker:
    """The worker of a whole job, when it has ended."""
    worker = worker_of(config, folder, EngineGroups.single_process(), **own)
    try:
        while not _advance(worker):
            pass
        worker.finish()
        worker.close()
    finally:
        worker.hooks.detach()
    return worker


def test_a_run_learns_evaluates_and_exports(tmp_path: Path) -> None:
    config = small_job(
        tmp_path,
        steps=8,
        evaluation_fraction=0.1,
        evaluation_rows=4,
        evaluation_period_steps=5,
        export_dir=str(tmp_path / "export"),
        precision="bfloat16",
        checkpoint_activations=True,
        balance_weight=0.01,
    )
    engine = run(config, tmp_path).engine
    lines = logged(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(8))
    assert lines[-1]["loss"] < lines[0]["loss"] - 1.0
    assert [line["step"] for line in lines if "evaluation_loss" in line] == [4, 7]
    assert all(line["tokens"] == 8 * 24 and line["generation"] == 1 for line in lines)
    again = Engine.from_pretrained(tmp_path / "export")
    trained = dict(engine.model.named_parameters())
    assert all(torch.equal(p, trained[name]) for name, p in again.model.named_parameters())


def test_a_run_goes_on_from_the_weights_of_a_checkpoint(tmp_path: Path) -> None:
    first = small_job(tmp_path, steps=6, export_dir=str(tmp_path / "export"))
    run(first, tmp_path)
    before = logged(tmp_path / "run")
    run(replace(first, model=first.export_dir, export_dir="", weights="checkpoint"), tmp_path)
    after = logged(tmp_path / "run")
    assert after[0]["loss"] < before[-1]["loss"] + 0.5 < before[0]["loss"]


def test_a_wish_to_end_is_followed_after_the_step(tmp_path: Path) -> None:
    asked = iter([False, True])
    config = small_job(tmp_path, export_dir=str(tmp_path / "export"))
    worker = run(config, tmp_path, is_asked_to_stop=lambda: next(asked))
    assert worker.step == len(logged(tmp_path / "run")) == 2
    assert not (tmp_path / "export").exists()


def test_a_model_without_experts_is_trained_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path / "model", "llama")
    run(small_job(tmp_path, steps=4), tmp_path)
    lines = logged(tmp_path / "run")
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert any(one.levelname == "WARNING" and "llama" in one.message for one in caplog.records)


def test_vectors_are_not_decayed(tmp_path: Path) -> None:
    engine = run(small_job(tmp_path, steps=1), tmp_path).engine
    optimizer = job_module.make_optimizer(EngineConfig(weight_decay=0.3), engine)
    matrices, vectors = optimizer.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert all(p.ndim == 1 for p in vectors["params"])
    assert {id(p) for p in engine.expert_parameters()} <= {id(p) for p in matrices["params"]}


def test_a_loss_that_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    write_model(tmp_path / "model", initializer_range=1e30)
    worker = run(small_job(tmp_path, steps=2), tmp_path)
    assert worker.step == len(logged(tmp_path / "run")) == 2
    assert not worker.was_applied and worker.engine.states.num_updates == 0


def empty(folder: Path) -> EngineConfig:
    (folder / "empty.bin").write_bytes(b"")
    return small_job(folder, data=(str(folder / "empty.bin"),), data_dtype="uint16")


def foreign_checkpoint(folder: Path) -> EngineConfig:
    job = small_job(folder, steps=1, export_dir=str(folder / "export"))
    run(job, folder)
    write_model(folder / "export", "mixtral")
    (folder / "run" / "steps.jsonl").unlink()
    return replace(job, model=job.export_dir, export_dir="", weights="checkpoint")


def exported_twice(folder: Path) -> EngineConfig:
    (folder / "export").mkdir()
    (folder / "export" / "model.safetensors.index.json").write_text("{}")
    return small_job(folder, export_dir=str(folder / "export"))


def larger_vocabulary(folder: Path) -> EngineConfig:
    write_data(folder / "tokens.bin", vocab_size=97)
    return small_job(folder)


def unknown_family(folder: Path) -> EngineConfig:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "nobody"}')
    return small_job(folder)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda folder: small_job(folder, model=str(folder / "none")), ConfigError),
        (unknown_family, ConfigError),
        (lambda folder: small_job(folder, weights="checkpoint"), DataError),
        (foreign_checkpoint, DataError),
        (lambda folder: small_job(folder, data=(str(folder / "none.bin"),)), PacekeeperError),
        (empty, DataError),
        (lambda folder: small_job(folder, row_tokens=5_000), DataError),
        (larger_vocabulary, ConfigError),
        (lambda folder: small_job(folder, slots_per_rank=3), ConfigError),
        (lambda folder: small_job(folder, replicas=2), ConfigError),
        (exported_twice, ConfigError),
        (lambda folder: small_job(folder, bias_rate=0.1), ConfigError),
    ],
)
def test_what_cannot_be_trained_is_rejected_before_anything_starts(
    tmp_path: Path, make: Callable[[Path], EngineConfig], error: type[PacekeeperError]
) -> None:
    config = make(tmp_path)
    with pytest.raises(error):
        run(config, tmp_path)
    assert not logged(tmp_path / "run")


def test_a_token_outside_of_the_vocabulary_is_named(tmp_path: Path) -> None:
    tokens = [*range(3, 90)] * 20 + [200] + [*range(3, 90)] * 20
    write_tokens(tmp_path / "tokens.bin", tokens)
    (tmp_path / "tokens.bin.json").unlink()
    with pytest.raises(DataError, match="200"):
        run(small_job(tmp_path, data_dtype="uint16", steps=60), tmp_path)


def test_too_little_memory_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "available_memory", lambda *_: 1_000)
    with pytest.raises(ConfigError, match="memory"):
        run(small_job(tmp_path), tmp_path)
    assert not logged(tmp_path / "run")


def test_tensorboard_that_is_missing_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(HostError):
        run(small_job(tmp_path, tensorboard_dir=str(tmp_path / "board")), tmp_path)


@pytest.mark.parametrize("change", [{"learning_rate": 0.02}, {"data": "other.bin"}])
def test_ranks_with_different_settings_do_not_start(tmp_path: Path, change: dict[str, Any]) -> None:
    config = small_job(tmp_path)
    if "data" in change:
        other = write_data(tmp_path / "other.bin", num_tokens=5_000)
        change = {"data": (str(other),)}

    def work(group: ThreadGroup) -> bool:
        own = replace(config, **change) if group.rank == 1 else config
        groups = EngineGroups(exchange=group, gradients=group, control=group, snapshots=group)
        with pytest.raises(ConfigError, match=next(iter(change))):
            worker_of(own, tmp_path / str(group.rank), groups)
        return True

    assert all(run_ranks(2, work))


def test_data_of_one_rank_that_is_missing_stops_all(tmp_path: Path) -> None:
    config = small_job(tmp_path)

    def work(group: ThreadGroup) -> str:
        own = replace(config, data=("none.bin",)) if group.rank == 1 else config
        groups = EngineGroups(exchange=group, gradients=group, control=group, snapshots=group)
        with pytest.raises(PacekeeperError) as caught:
            worker_of(own, tmp_path / str(group.rank), groups)
        return type(caught.value).__name__

    assert run_ranks(2, work)[0] == "OtherRanksError"


def emulated(folder: Path, **own: Any) -> tuple[EngineDevice, list[MicroBatchRecord]]:
    worker = run(small_job(folder, emulate=True, emulated_noise=False, **own), folder)
    assert worker.emulated is not None and worker.hooks.ring.path is not None
    records = records_in(Path(worker.hooks.ring.path))
    return worker.emulated, [one for one in records if isinstance(one, MicroBatchRecord)]


def test_steps_on_an_emulated_device_take_the_given_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rank-0.json").write_text('{"slowdown": 1.5}')
    large = write_model(tmp_path / "large", hidden_size=512, head_dim=64)
    device, records = emulated(
        tmp_path,
        steps=3,
        rows_per_microbatch=4,
        emulated_step_s=0.2,
        emulated_model=str(large),
        emulated_row_tokens=1024,
    )
    (truth,) = map(json.loads, (tmp_path / "truth.jsonl").read_text().splitlines())
    assert (truth["step"], truth["slowdown"]) == (0, 1.5)
    # Documents are shorter than rows, and routing is not even.
    assert device.busy_s == pytest.approx(3 * 1.5 * 0.2, rel=0.3)
    assert sum(one.compute_s for one in records) == pytest.approx(device.busy_s)
    assert any(one.levelname == "WARNING" and "emulated" in one.message for one in caplog.records)


def test_a_host_that_is_too_slow_for_the_emulated_device_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device, _ = emulated(tmp_path, emulated_step_s=1e-6)
    assert device.overrun_s > device.busy_s
    assert any("emulated_step_s" in one.message for one in caplog.records)


def test_an_emulated_model_of_another_structure_is_rejected(tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", "mixtral")
    with pytest.raises(ConfigError, match="emulated_model"):
        emulated(tmp_path, emulated_model=str(other))
