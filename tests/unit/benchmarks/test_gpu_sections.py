"""The sections of benchmarks/gpu in small on a CPU: that they run, and what they must find."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.gpu import kernels, nvml, prediction, ranks, timing, training
from benchmarks.gpu.common import REAL, TINY, Ratio, interleaved, worst

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.telemetry.records import MicroBatchRecord
from pacekeeper.core.telemetry.samples import DeviceSample
from pacekeeper.predictor.cost.features import sample_of
from support.fake_nvml import Driver, build, compiler, environment
from support.tree import ROOT

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_a_small_model_learns_its_micro_batch() -> None:
    found = training.train(CPU, TINY)
    assert found.last_loss < found.first_loss and found.steps == TINY.steps


def test_experts_move_to_other_slots_and_training_goes_on() -> None:
    found = training.move_between_slots(CPU, TINY)
    assert found.is_bit_equal and found.are_free_slots_zero
    assert found.moved_experts == 2 * TINY.small.layers


def test_grouped_products_are_those_of_the_loop() -> None:
    found = kernels.compare_products(CPU, TINY)
    assert found.are_empty_gradients_zero
    assert [shape.name for shape in found.shapes] == list(TINY.grouped)


@pytest.mark.parametrize(("experts", "rows"), [(1, 16), (8, 100), (128, 65_536)])
def test_skewed_rows_add_up(experts: int, rows: int) -> None:
    counts = kernels.skewed_counts(experts, rows)
    assert len(counts) == experts and sum(counts) == rows and min(counts) >= 0
    assert experts < 8 or max(counts) > 1.3 * rows / experts


def test_the_clock_knows_all_micro_batches() -> None:
    found = timing.compare_clocks(CPU, TINY)
    assert found.times_known == found.steps_ahead == TINY.repeats and found.num_lost == 0


def test_costs_are_ratios_of_pairs() -> None:
    assert [one.name for one in timing.cost_of_engine(CPU, TINY).steps] == ["small", "large"]
    assert timing.cost_of_hooks(CPU, TINY).calls_us > 0.0


def test_a_ratio_lies_within_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = {"own": 3.0, "other": 2.0}
    monkeypatch.setattr("benchmarks.gpu.common.wall_s", lambda _, action: action())
    found: Ratio = interleaved("x", CPU, lambda: spent["own"], lambda: spent["other"], 8)
    assert found.median == found.lower95 == found.upper95 == 1.5
    assert (found.seconds, found.against_seconds) == (3.0, 2.0)
    assert worst([1.1, 0.7, 1.2]) == pytest.approx(-0.3)


def test_the_price_model_is_judged_on_what_it_was_not_fitted_to() -> None:
    found = prediction.judge_price_model(CPU, TINY)
    assert [one.judged_on for one in found.errors] == ["later, same shapes", "shapes not fitted to"]
    assert all(one.count > 0 for one in found.errors)


def record(step: int, compute_s: float, **own: Any) -> MicroBatchRecord:
    given = {"tokens": 100, "sum_len_squared": 1000, "expert_rows": 200, "num_documents": 1} | own
    return MicroBatchRecord(
        rank=0, step=step, micro_batch=0, generation=1, compute_s=compute_s, **given
    )


def test_errors_of_a_price_model_that_is_right_are_small() -> None:
    order = [shape for _ in range(REAL.repeats) for shape in REAL.shapes]
    records = [
        record(i, 1e-3 + 1e-5 * rows * tokens, tokens=rows * tokens, expert_rows=2 * rows * tokens,
               sum_len_squared=rows * tokens**2, num_documents=rows)
        for i, (rows, tokens) in enumerate(order)
    ]  # fmt: skip
    features = np.concatenate([sample_of([one]).features for one in records])
    found = prediction._judged(order, features, np.array([r.compute_s for r in records]), REAL)
    assert found.noise == pytest.approx(0.0)
    assert all(one.mean < 0.01 for one in found.errors)
    assert found.slowest_ms > found.fastest_ms


def test_the_detector_names_a_rank_beside_its_own_earlier_times() -> None:
    config = DetectorConfig()
    noise = np.random.default_rng(0).normal(0.0, 0.01, 80)
    factors = [2.0 if 40 <= step < 55 else 1.0 for step in range(80)]
    records = [record(s, f * float(np.exp(noise[s]))) for s, f in enumerate(factors)]
    said = prediction._judge(config, records, records[2:40])
    assert [40 <= step < 45 for step, _ in said.named] == [True]
    assert said.named[0][1] == pytest.approx(2.0, rel=0.1)
    assert said.recovered and 55 <= said.recovered[0] < 62


def test_a_competitor_is_started_and_ended() -> None:
    found = prediction.detect_competitor(CPU, TINY)
    assert found.alone_ms > 0.0 and found.beside_ms > 0.0 and found.disturbed_steps == 15


def test_ranks_that_share_a_device_train_as_one_does() -> None:
    found = ranks.share_device(CPU, TINY)
    assert found.are_replicas_equal and found.moved_bytes > 0 and found.ranks == 2


def test_groups_are_left_and_formed_again() -> None:
    found = ranks.reconfigure(CPU, TINY)
    assert found.are_sums_right and found.generations == TINY.steps


def test_reasons_of_clock_events_have_names() -> None:
    assert nvml.reason_names(None) == "not reported"
    assert nvml.reason_names(0) == "none"
    assert nvml.reason_names(0x1 | 0x4 | 0x8000) == "idle, software power cap, 0x8000"


def test_time_held_down_is_the_difference_of_counters() -> None:
    first = DeviceSample(device_index=0, device_uuid="", sampled_s=0.0, power_cap_held_s=1.0)
    last = DeviceSample(device_index=0, device_uuid="", sampled_s=0.0, power_cap_held_s=1.5)
    assert nvml._held(first, last) == "power_cap 0.50"


@pytest.mark.skipif(compiler() is None, reason="needs a C compiler")
def test_nvml_is_read_by_the_reader_of_the_agent(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "driver", num_devices=2)
    driver.devices[0].reasons = 0x4
    read = "import torch\nfrom benchmarks.gpu import nvml, common\n"
    read += "print(nvml.read_device(torch.device('cpu'), common.TINY))"
    found = subprocess.run(
        [sys.executable, "-c", read],
        env={**os.environ, **environment(build(tmp_path), driver), "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "devices=2" in found and "H100" in found and "software power cap" in found
    assert "sm_active_ratio=0.8" in found  # from the second reading on
