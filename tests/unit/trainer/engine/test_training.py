"""The loop of `pacekeeper launch` in one process, and what it rejects before it starts."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import ConfigError, DataError, HostError, PacekeeperError
from pacekeeper.core.kernel_laws.noise import NO_NOISE
from pacekeeper.core.telemetry.attachment import Clock
from pacekeeper.core.telemetry.records import MicroBatchRecord
from pacekeeper.trainer.emulation.engine_device import EngineDevice
from pacekeeper.trainer.emulation.faults import COMPUTE_FAULT, FaultInjector
from pacekeeper.trainer.engine import job as job_module
from pacekeeper.trainer.engine.engine import Engine
from pacekeeper.trainer.engine.job import learning_rate, open_data
from pacekeeper.trainer.engine.training import train
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.hooks import hooks
from support.engine_jobs import logged, small_job, write_data, write_model
from support.rank_threads import ThreadGroup, run_ranks
from support.rings import records_in
from support.token_files import write_tokens

CPU = torch.device("cpu")


def run(config: EngineConfig, folder: Path, **given: Any) -> Engine:
    groups = EngineGroups.single_process()
    return train(config, groups, device=CPU, run_dir=folder / "run", **given)


def test_the_learning_rate_rises_and_falls() -> None:
    config = EngineConfig(steps=100, warmup_steps=10, learning_rate=1.0, final_ratio=0.2)
    rates = [learning_rate(config, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0
    assert rates[99] == pytest.approx(0.2)
    assert rates[54] == pytest.approx(0.6)  # the middle of the decay
    assert all(a >= b for a, b in pairwise(rates[9:]))
    linear = replace(config, decay="linear")
    assert learning_rate(linear, 32) == pytest.approx(1.0 - 0.8 * 23 / 90)
    assert learning_rate(replace(config, decay="constant"), 99) == 1.0
    assert learning_rate(replace(config, warmup_steps=100), 99) == 1.0


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
    engine = run(config, tmp_path)
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


def test_a_wish_to_end_is_followed_before_the_next_step(tmp_path: Path) -> None:
    asked = iter([False, False, True])
    config = small_job(tmp_path, export_dir=str(tmp_path / "export"))
    engine = run(config, tmp_path, is_stop_asked=lambda: next(asked))
    assert engine.num_steps == len(logged(tmp_path / "run")) == 2
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
    engine = run(small_job(tmp_path, steps=1), tmp_path)
    optimizer = job_module.make_optimizer(EngineConfig(weight_decay=0.3), engine)
    matrices, vectors = optimizer.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert all(p.ndim == 1 for p in vectors["params"])
    assert {id(p) for p in engine.expert_parameters()} <= {id(p) for p in matrices["params"]}


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    write_model(tmp_path / "model", initializer_range=1e30)
    with pytest.raises(PacekeeperError, match="step 0"):
        run(small_job(tmp_path), tmp_path)
    assert not logged(tmp_path / "run")


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
    assert not (tmp_path / "run").exists()


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
            train(own, groups, device=CPU, run_dir=tmp_path / "run")
        return True

    assert all(run_ranks(2, work))


def test_data_of_one_rank_that_is_missing_stops_all(tmp_path: Path) -> None:
    config = small_job(tmp_path)

    def work(group: ThreadGroup) -> str:
        own = replace(config, data=("none.bin",)) if group.rank == 1 else config
        groups = EngineGroups(exchange=group, gradients=group, control=group, snapshots=group)
        with pytest.raises(PacekeeperError) as caught:
            train(own, groups, device=CPU, run_dir=tmp_path / "run")
        return type(caught.value).__name__

    assert run_ranks(2, work)[0] == "OtherRanksError"


def test_held_out_tokens_are_not_trained_on(tmp_path: Path) -> None:
    config = small_job(tmp_path, evaluation_fraction=0.25)
    sampler, evaluation = open_data(config, 96)
    assert evaluation is not None
    assert sampler.stream.end == evaluation.stream.first
    assert evaluation.stream.num_tokens == round(0.25 * (sampler.stream.num_tokens * 4 / 3))


def emulated(folder: Path, config: EngineConfig) -> tuple[EngineDevice, list[MicroBatchRecord]]:
    device = EngineDevice.seeded(0, NO_NOISE)
    pace = hooks.attach(
        job="j", rank=0, world_size=1, ring_dir=str(folder), clock=Clock.EMULATED, timer=device
    )
    faults = FaultInjector(directory=folder, rank=0, targets={COMPUTE_FAULT: device})
    run(config, folder, hooks=pace, emulated=device, faults=faults)
    pace.detach()
    assert pace.ring.path is not None
    records = records_in(Path(pace.ring.path))
    return device, [one for one in records if isinstance(one, MicroBatchRecord)]


def test_steps_on_an_emulated_device_take_the_given_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rank-0.json").write_text('{"slowdown": 1.5}')
    large = write_model(tmp_path / "large", hidden_size=512, head_dim=64)
    config = small_job(
        tmp_path,
        steps=3,
        rows_per_microbatch=4,
        emulate=True,
        emulated_step_s=0.2,
        emulated_model=str(large),
        emulated_row_tokens=1024,
    )
    device, records = emulated(tmp_path, config)
    (truth,) = map(json.loads, (tmp_path / "truth.jsonl").read_text().splitlines())
    assert (truth["step"], truth["slowdown"]) == (0, 1.5)
    # Documents are shorter than rows, and routing is not even.
    assert device.busy_s == pytest.approx(3 * 1.5 * 0.2, rel=0.3)
    assert sum(one.compute_s for one in records) == pytest.approx(device.busy_s)
    assert any(one.levelname == "WARNING" and "emulated" in one.message for one in caplog.records)


def test_a_host_that_is_too_slow_for_the_emulated_device_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device, _ = emulated(tmp_path, small_job(tmp_path, emulate=True, emulated_step_s=1e-6))
    assert device.overrun_s > device.busy_s
    assert any("emulated_step_s" in one.message for one in caplog.records)


def test_an_emulated_model_of_another_structure_is_rejected(tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", "mixtral")
    config = small_job(tmp_path, emulate=True, emulated_model=str(other))
    with pytest.raises(ConfigError, match="emulated_model"):
        emulated(tmp_path, config)
