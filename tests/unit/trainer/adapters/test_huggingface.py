"""The Trainer's moments in any order, and what of it is untold; the real one: integration."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from pacekeeper.core.telemetry.records import MicroBatchRecord, StepRecord
from pacekeeper.trainer.adapters import huggingface, pytorch
from pacekeeper.trainer.adapters.huggingface import Pacekeeper
from support.examples import examples
from support.foreign_models import TinyModel
from support.rings import records_in

IDS = torch.arange(12).reshape(3, 4)


def arguments(**others: Any) -> Any:
    values = {"device": torch.device("cpu"), "process_index": 0, "world_size": 1, "n_gpu": 0}
    return SimpleNamespace(**values | others)


class Run:
    """A Trainer that does what it is told, right or wrong."""

    def __init__(self, directory: Path) -> None:
        self.watch = Pacekeeper(job="j", ring_dir=str(directory))
        self.model = TinyModel()
        self.loader: Any = DataLoader(range(3), batch_size=None)  # type: ignore[arg-type]
        self.state = SimpleNamespace(global_step=0, num_input_tokens_seen=0)
        self.errors = 0

    def say(self, moment: str) -> None:
        if moment == "on_step_end":
            self.state.global_step += 1
        parts = {"model": self.model}
        assert getattr(self.watch, moment)(arguments(), self.state, None, **parts) is None

    def train_pass(self) -> None:
        self.model(input_ids=IDS)["logits"].sum().backward()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(input_ids=IDS)
        self.model.train()

    def load(self) -> None:
        assert list(self.loader) == [0, 1, 2]


MOMENTS = ("on_train_begin", "on_step_begin", "on_step_end", "on_substep_end", "on_train_end")
ACTS = (*MOMENTS, "on_prediction_step", "pass", "evaluate", "load")


@settings(max_examples=examples(40))
@given(acts=st.lists(st.sampled_from(ACTS), max_size=25))
def test_in_any_order_nothing_raises_and_nothing_is_told_twice(
    tmp_path_factory: pytest.TempPathFactory, acts: list[str]
) -> None:
    directory = tmp_path_factory.mktemp("ring")
    run = Run(directory)
    run.say("on_train_begin")
    begun, expected, has_passed = -1, list[tuple[int, int]](), 0
    for act in acts:
        match act:
            case "pass":
                run.train_pass()
                has_passed += begun >= 0
            case "evaluate":
                run.evaluate()
            case "load":
                run.load()
            case "on_train_begin" | "on_train_end":
                continue  # a run's records are one ring
            case moment:
                if moment == "on_step_begin" and begun != run.state.global_step:
                    begun, has_passed = run.state.global_step, 0
                if moment == "on_step_end" and begun >= 0:
                    expected.append((begun, has_passed))
                    begun = -1
                run.say(moment)
    pace = run.watch.pace
    assert pace is not None and pace.ring.num_errors == 0
    run.say("on_train_end")
    run.train_pass()
    records = records_in(directory / "j" / "rank-00000.ring")
    assert [r.step for r in records if isinstance(r, StepRecord)] == [step for step, _ in expected]
    for step, passes in expected:
        told = [
            r.micro_batch for r in records if isinstance(r, MicroBatchRecord) and r.step == step
        ]
        assert told == list(range(passes))
    assert not run.model._forward_hooks, "the model is as it was"


def test_each_run_of_a_process_is_a_life_of_its_own(tmp_path: Path) -> None:
    run = Run(tmp_path)
    lives = []
    for _ in range(2):
        run.say("on_train_begin")
        assert run.watch.pace is not None
        lives.append(run.watch.pace.ring.run_id)
    assert lives[1] > lives[0]
    run.say("on_train_end")
    assert run.watch.pace is None


def test_input_is_timed_but_for_the_first(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.say("on_train_begin")
    batches = iter(run.loader)
    pace = run.watch.pace
    assert pace is not None
    waits = list[Any]()
    for _ in range(3):
        next(batches)
        waits.append(pace.input_s)
    assert waits[0] is None and waits[1] is not None and waits[2] >= waits[1]
    run.say("on_train_end")


@pytest.mark.parametrize(
    ("others", "model", "why"),
    [
        ({}, TinyModel(), ""),
        ({}, None, "no torch module"),
        ({"n_gpu": 2}, TinyModel(), "several devices"),
        ({"deepspeed": "ds.json"}, TinyModel(), "DeepSpeed"),
        ({"torch_compile": True}, TinyModel(), "compiled"),
    ],
)
def test_where_passes_can_not_be_timed_steps_are_told_alone(
    others: dict[str, Any], model: Any, why: str
) -> None:
    said = huggingface.why_steps_alone(arguments(**others), model)
    assert (why in said) if why else said == ""


def test_a_wrong_job_is_said_when_it_is_made_and_trouble_later_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="job name"):
        Pacekeeper(job="not a name")
    with pytest.raises(AttributeError):
        Pacekeeper(job="j").no_moment  # noqa: B018
    monkeypatch.setattr(pytorch, "attach", None)
    run = Run(tmp_path)
    for moment in MOMENTS:
        run.say(moment)
    run.say("on_train_begin")
    assert run.watch.pace is None
