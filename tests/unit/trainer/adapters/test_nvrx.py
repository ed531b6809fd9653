"""Sections of NVRx's kind, told to the ring: steps by the trainer's word, or by names again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.core.telemetry.records import MicroBatchRecord, Record, StepRecord
from pacekeeper.trainer.adapters.nvrx import CallableId, Detector
from support.foreign_models import TinyModel
from support.rings import records_in

IDS = torch.arange(12).reshape(3, 4)


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    Detector.shutdown()


def begin(directory: Path, **options: Any) -> None:
    Detector.initialize(**{"job": "j", "ring_dir": str(directory), **options})


def told(directory: Path) -> list[Record]:
    return records_in(directory / "j" / "rank-00000.ring")


def kinds(records: list[Record]) -> list[str]:
    return [type(record).__name__.removesuffix("Record") for record in records]


def test_a_step_is_what_lies_between_two_calls_that_ask_for_a_report(tmp_path: Path) -> None:
    begin(tmp_path)
    for _ in range(3):
        with Detector.detection_section("data", profile_cuda=False):
            pass
        for _ in range(2):  # gradients are accumulated
            with Detector.detection_section("fwd"), Detector.detection_section("attention"):
                pass
        assert Detector.generate_report_if_interval_elapsed() is None
    # The first step can not know yet that its end will be told: "fwd" came again.
    assert kinds(told(tmp_path))[2:] == ["MicroBatch", "Step"] * 3
    assert all(
        r.tokens == 0 for r in told(tmp_path) if isinstance(r, MicroBatchRecord | StepRecord)
    )


def test_in_the_published_example_a_step_ends_when_a_name_comes_again(tmp_path: Path) -> None:
    begin(tmp_path)
    for step in range(4):
        with Detector.detection_section("fwd", profile_cuda=True):
            pass
        if step % 2 == 0:
            report = Detector.generate_report()
            assert report is not None and set(report.local_section_summaries) == {"fwd"}
    Detector.shutdown()
    records = told(tmp_path)
    assert kinds(records) == ["MicroBatch", "Step"] * 4
    assert [r.step for r in records if isinstance(r, StepRecord)] == [0, 1, 2, 3]


def test_what_does_not_compute_is_no_part_of_a_micro_batch(tmp_path: Path) -> None:
    begin(tmp_path)
    with Detector.detection_section("data", profile_cuda=False):
        pass
    Detector.generate_report_if_interval_elapsed()
    assert kinds(told(tmp_path)) == ["Step"]


def test_where_a_model_is_given_its_passes_are_told_with_their_work(tmp_path: Path) -> None:
    model = TinyModel()
    begin(tmp_path, model=model)
    for _ in range(2):
        with Detector.detection_section("step"):
            for _ in range(2):
                model(input_ids=IDS)["logits"].sum().backward()
        Detector.generate_report_if_interval_elapsed()
    records = told(tmp_path)
    assert kinds(records) == ["MicroBatch", "MicroBatch", "Step"] * 2
    assert {r.tokens for r in records if isinstance(r, MicroBatchRecord)} == {12}


def test_without_a_job_there_are_reports_and_no_ring(tmp_path: Path) -> None:
    Detector.initialize(ring_dir=str(tmp_path))
    with Detector.detection_section():
        pass
    report = Detector.generate_report()
    assert report is not None
    (name,) = report.local_section_summaries
    assert name.startswith(f"{__file__}:")
    assert not list(tmp_path.iterdir())
    assert report.identify_suspects() == set()


def test_the_controllers_findings_come_with_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path)
    with Detector.detection_section("fwd"):
        pass
    hooks = Detector._steps._teller
    assert hooks is not None
    monkeypatch.setattr(hooks.pace, "suspect_ranks", lambda: frozenset({0}))
    report = Detector.generate_report()
    assert report is not None
    assert {one.rank for one in report.identify_suspects()} == {0}


def test_a_section_that_raises_measures_nothing_and_hides_nothing(tmp_path: Path) -> None:
    begin(tmp_path)
    with pytest.raises(ZeroDivisionError), Detector.detection_section("fwd"):
        raise ZeroDivisionError
    Detector.generate_report_if_interval_elapsed()
    report = Detector.generate_report()
    assert report is not None and report.local_section_summaries == {}
    assert kinds(told(tmp_path)) == ["Step"]


def test_misuse_is_refused_as_there(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="not be instantiated"):
        Detector()
    with pytest.raises(RuntimeError, match="not initialized"), Detector.detection_section("x"):
        pass
    with pytest.raises(ValueError, match="job name"):
        Detector.initialize(job="not a name")
    begin(tmp_path)
    with pytest.raises(AssertionError):
        begin(tmp_path)


def test_functions_are_named_as_there() -> None:
    import json

    assert str(CallableId(json, "dumps")) == "json.dumps"
    assert str(CallableId(Path, "open")) == f"{Path.__module__}.Path.open"
    assert str(CallableId(TinyModel(), "forward")) == "TinyModel.forward"


CALLS = st.lists(st.sampled_from(["a", "b", "data", "nested", "raises", "next"]), max_size=25)


@settings(max_examples=40)
@given(calls=CALLS)
def test_in_any_order_each_step_is_told_once(
    tmp_path_factory: pytest.TempPathFactory, calls: list[str]
) -> None:
    directory = tmp_path_factory.mktemp("ring")
    begin(directory)
    try:
        for call in calls:
            match call:
                case "next":
                    Detector.generate_report_if_interval_elapsed()
                case "nested":
                    with Detector.detection_section("a"), Detector.detection_section("b"):
                        pass
                case "raises":
                    with pytest.raises(KeyError), Detector.detection_section("a"):
                        raise KeyError
                case name:
                    with Detector.detection_section(name, profile_cuda=name != "data"):
                        pass
    finally:
        teller = Detector._steps._teller
        Detector.shutdown()
    if teller is None:
        assert set(calls) <= {"next"}
        return
    assert teller.pace.ring.num_errors == 0
    records = told(directory)
    steps = [r.step for r in records if isinstance(r, StepRecord)]
    assert steps == sorted(set(steps))
    batches = [r for r in records if isinstance(r, MicroBatchRecord)]
    assert len({r.step for r in batches}) == len(batches), "one micro-batch a step"
    assert {r.step for r in batches} <= set(steps)
