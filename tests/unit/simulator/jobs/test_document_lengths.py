"""Real lengths as workload: packed, priced, and told to a detector that accuses nobody of them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.errors import ConfigError, DataError
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.predictor.cost.features import FEATURES
from pacekeeper.simulator.engine import detection_model
from pacekeeper.simulator.engine.controller_in_loop import Watcher
from pacekeeper.simulator.jobs.data_parallel import Dispatch
from pacekeeper.simulator.jobs.document_lengths import Lengths, read_lengths
from pacekeeper.simulator.jobs.expert_routing import even_routing
from pacekeeper.simulator.scenario.loader import read_scenario, run_scenario
from support.examples import seeds
from support.pipeline_jobs import pipeline_job
from support.scenarios import small_tables, written
from support.sim_jobs import small_job

# A few long documents among many short ones: their squares are most of what differs.
ODD = Lengths(tokens=np.array([100] * 50 + [4000, 16000]), doubling_tokens=2048.0).split(4096)
JOB = small_job(
    num_layers=2,
    num_experts=6,
    slots_per_node=4,
    samples_per_node=2,
    tokens_per_sample=4096,
    balanced_step_s=1.0,
)


def sight(speed: Mapping[int, float], seed: int) -> detection_model.Detection:
    return detection_model.simulate_detection(
        JOB,
        even_layout(ranks=range(6), num_layers=2, num_experts=6, replicas=2),
        even_routing(2, 6).at(0),
        Dispatch.EVENED,
        known={},
        speed=speed,
        config=DetectorConfig(),
        seed=seed,
        lengths=ODD,
    )


@given(
    tokens=st.lists(st.integers(1, 5000), min_size=1, max_size=30),
    budgets=st.lists(st.integers(0, 20_000), min_size=1, max_size=6),
    sequence=st.integers(1, 5000),
)
def test_micro_batches_are_full_of_documents_and_of_nothing_else(
    tokens: list[int], budgets: list[int], sequence: int
) -> None:
    lengths = Lengths(tokens=np.array(tokens), doubling_tokens=1000.0).split(sequence)
    assert lengths.tokens.sum() == sum(tokens) and lengths.tokens.max() <= sequence
    packed = lengths.packed(budgets, np.random.default_rng(0))
    assert packed.tokens.tolist() == budgets
    # Squares of n documents that add up to a budget lie between even ones and the longest ones.
    whole = zip(
        budgets, packed.num_documents.tolist(), packed.sum_len_squared.tolist(), strict=True
    )
    for budget, number, squares in whole:
        assert (number == 0) == (budget == 0) == (squares == 0)
        assert budget**2 <= squares * max(number, 1) and squares <= budget * sequence


def test_a_mean_micro_batch_costs_one_and_squares_make_the_difference() -> None:
    packed = ODD.packed([8192] * 2000, np.random.default_rng(1))
    price = ODD.price(packed, 8192)
    assert price.mean() == pytest.approx(1.0, rel=0.02) and price.std() > 0.1
    order = np.argsort(packed.sum_len_squared)
    assert (np.diff(price[order]) >= 0.0).all()
    assert replace(ODD, doubling_tokens=1e12).price(packed, 8192).std() < 1e-6
    assert ODD.quadratic_share(8192) == pytest.approx(
        1.0 - 1.0 / (1.0 + packed.sum_len_squared.mean() / 8192 / 2048), rel=0.02
    )


@pytest.mark.parametrize("seed", seeds(3))
def test_long_documents_are_nobodys_fault_and_hide_nobody(seed: int) -> None:
    assert sight({}, seed).slow == {}
    assert sight({2: 0.85}, seed).slow == {2: pytest.approx(1.18, rel=0.1)}


def test_who_is_told_no_squares_sees_a_slow_device_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lengths that the test above draws are no easy ones."""

    def untold(*values: Any) -> Any:
        features, dearer = drawn(*values)
        for name in ("sum_len_squared", "num_documents"):
            features[:, FEATURES.index(name)] = 0.0
        return features, dearer

    told = [sight({2: 0.9}, seed).steps for seed in range(3)]
    drawn = detection_model._documents
    monkeypatch.setattr(detection_model, "_documents", untold)
    blind = [sight({2: 0.9}, seed).steps for seed in range(3)]
    assert all(late >= 2 * soon for soon, late in zip(told, blind, strict=True)), (told, blind)


def test_ranks_of_a_pipelined_job_are_told_the_squares_of_their_own_heads() -> None:
    job = pipeline_job()
    lengths = replace(ODD, doubling_tokens=16384.0)
    watcher = Watcher(job, ControllerConfig(), 0, lengths)
    watched = watcher.begun(job.baseline.ranks, job.baseline)
    assert watched.slow == {}
    told = watcher._records(watched, job.baseline, {}, 0)
    (pipeline, *_) = job.baseline.pipelines
    for cell in pipeline.cells:
        first, second, *_ = (told[rank][:-1] for rank in cell.ranks)
        of_first = [(one.tokens, one.sum_len_squared) for one in first]  # type: ignore[union-attr]
        assert of_first == [(one.tokens, one.sum_len_squared) for one in second]  # type: ignore[union-attr]
        assert len({squares for _, squares in of_first}) > 1
    steps, watched = watcher.until_seen(watched, job.baseline, {0: 0.5})
    assert watched.slow == {0: pytest.approx(2.0, rel=0.1)} and steps < 10


@pytest.mark.parametrize(
    ("values", "text", "said"),
    [
        ({"file": ""}, "n\n1\n", "[lengths] file: expected a path"),
        ({"column": "m"}, "n,k\n1,2\n", "has no 'm'; it has k, n"),
        ({"doubling_tokens": 0.0}, "n\n1\n", "[lengths] doubling_tokens: expected at least 1"),
        ({}, "n\n0\n0\n", "column n has no document of any length"),
        ({}, "n\n5\n2.5\nx\n", "column n: 2 of 3 are no whole number of tokens, the first 2.5"),
        ({}, "n\n-4\n", "column n: 1 of 1 are no whole number of tokens, the first -4.0"),
        ({"other": 1}, "n\n1\n", "[lengths] other: unknown key"),
        ({}, "n\n900000000\n", "pieces of a sequence: 9e+07, expected at most 20,000,000"),
    ],
)
def test_what_is_wrong_with_lengths_is_said_with_file_key_and_what_was_expected(
    tmp_path: Path, values: dict[str, Any], text: str, said: str
) -> None:
    (tmp_path / "documents.csv").write_text(text)
    asked = {"file": "documents.csv", "column": "n", "doubling_tokens": 100.0} | values
    with pytest.raises((ConfigError, DataError)) as refused:
        read_lengths(asked, tmp_path / "x.toml", sequence_tokens=10, batch_tokens=100)
    assert said in str(refused.value), refused.value


def test_batches_that_nobody_could_hold_are_refused(tmp_path: Path) -> None:
    (tmp_path / "documents.csv").write_text("n\n1\n")
    asked = {"file": "documents.csv", "column": "n", "doubling_tokens": 100.0}
    for tokens, said in ((10**6, "documents of a micro-batch"), (10**10, "tokens of a micro")):
        with pytest.raises(ConfigError, match=said):
            read_lengths(asked, tmp_path / "x.toml", sequence_tokens=10, batch_tokens=tokens)


def test_a_scenario_plays_with_them(tmp_path: Path) -> None:
    (tmp_path / "documents.csv").write_text("words,tokens\na,100\nb,5000\nc,30\n")
    tables = small_tables()
    tables["lengths"] = {"file": "documents.csv", "column": "tokens", "doubling_tokens": 100.0}
    known = read_scenario(written(tmp_path / "small.toml", tables))
    (ours,) = run_scenario(known, seeds=1)["ours"]
    tables.pop("lengths")
    (even,) = run_scenario(read_scenario(written(tmp_path / "small.toml", tables)), seeds=1)["ours"]
    assert ours.samples == pytest.approx(even.samples, rel=0.05)
    assert ours.samples != even.samples
