"""Lightning's moments in any order; the real one: integration."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from pacekeeper.core.telemetry.records import MicroBatchRecord, StepRecord
from pacekeeper.trainer.adapters import lightning, pytorch
from pacekeeper.trainer.adapters.instrumentation import module_passes
from pacekeeper.trainer.adapters.lightning import Pacekeeper
from support.examples import examples
from support.foreign_models import TinyModel
from support.rings import records_in

IDS = torch.arange(12).reshape(3, 4)


class Callback:
    """Stands for Lightning's own."""


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning, "_bases", lambda: (Callback,))
    monkeypatch.setattr(module_passes, "_LIGHTNING", (__name__,))


class Module(TinyModel):
    """A Lightning module, as far as the adapter looks at it."""

    def __init__(self, *, is_automatic: bool) -> None:
        super().__init__()
        self.automatic_optimization = is_automatic
        self.has_backward = True

    def training_step(self, batch: Any, number: int) -> Any:
        loss = sum(self(IDS)["logits"].sum() for _ in range(2))
        if self.automatic_optimization:
            return loss
        if self.has_backward:
            loss.backward()
        return None


class Run:
    """A Trainer that does what it is told, right or wrong."""

    def __init__(self, directory: Path, *, is_automatic: bool, is_wrapped: bool) -> None:
        self.watch = Pacekeeper(job="j", ring_dir=str(directory))
        self.module = Module(is_automatic=is_automatic)
        wrapper: Any = torch.nn.Sequential(self.module) if is_wrapped else self.module
        self.loader: Any = DataLoader(range(3), batch_size=None)  # type: ignore[arg-type]
        self.batches = 0
        self.trainer = SimpleNamespace(
            strategy=SimpleNamespace(root_device=torch.device("cpu"), model=wrapper),
            global_rank=0,
            world_size=1,
            global_step=0,
            optimizers=[],
            fit_loop=SimpleNamespace(total_batch_idx=0),
        )

    def say(self, moment: str, *more: Any) -> None:
        assert getattr(self.watch, moment)(self.trainer, self.module, *more) is None

    def batch(self, *, has_backward: bool, steps: bool) -> None:
        batch = {"input_ids": IDS}
        self.trainer.fit_loop.total_batch_idx = self.batches
        self.batches += 1
        self.say("on_train_batch_start", batch, 0)
        self.module.has_backward = has_backward
        loss = self.module.training_step(batch, 0)
        if has_backward and loss is not None:
            loss.backward()
        self.trainer.global_step += steps
        self.say("on_train_batch_end", None, batch, 0)

    def load(self) -> None:
        assert list(self.loader) == [0, 1, 2]


ACTS = ("accumulate", "step", "no loss", "load", "validate", "exception")


@settings(max_examples=examples(40))
@given(acts=st.lists(st.sampled_from(ACTS), max_size=16), is_automatic=st.booleans(),
       is_wrapped=st.booleans())  # fmt: skip
def test_in_any_order_each_step_and_micro_batch_is_told_once(
    tmp_path_factory: pytest.TempPathFactory,
    acts: list[str],
    is_automatic: bool,
    is_wrapped: bool,
) -> None:
    directory = tmp_path_factory.mktemp("ring")
    run = Run(directory, is_automatic=is_automatic, is_wrapped=is_wrapped)
    run.say("on_train_start")
    pace = run.watch.pace
    assert pace is not None
    expected: dict[int, int] = {}
    open_batches, is_over = 0, False
    for act in acts:
        match act:
            case "accumulate" | "step" | "no loss":
                before = run.trainer.global_step if is_automatic else run.batches
                steps = act == "step"
                run.batch(has_backward=act != "no loss", steps=steps)
                open_batches += act != "no loss" or not is_automatic
                if (steps or not is_automatic) and not is_over:
                    expected[before] = open_batches
                    open_batches = 0
            case "load":
                run.load()
            case "validate":
                run.say("on_validation_start")
                run.load()
                with torch.no_grad():
                    run.module(input_ids=IDS)
                run.say("on_validation_end")
            case "exception":
                run.say("on_exception", KeyError())
                is_over = True
    assert pace.ring.num_errors == 0
    run.say("on_train_end")
    assert "training_step" not in vars(run.module), "the module is as it was"
    records = records_in(directory / "j" / "rank-00000.ring")
    assert [r.step for r in records if isinstance(r, StepRecord)] == list(expected)
    told_work = {r.tokens for r in records if isinstance(r, MicroBatchRecord)}
    assert told_work <= {IDS.numel()}, "a batch's work, once, however often it is used"
    for step, count in expected.items():
        told = [
            r.micro_batch for r in records if isinstance(r, MicroBatchRecord) and r.step == step
        ]
        assert told == list(range(count))


def test_an_evaluation_in_the_middle_of_a_step_is_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    run = Run(tmp_path, is_automatic=True, is_wrapped=False)
    run.say("on_train_start")
    run.batch(has_backward=True, steps=False)
    run.say("on_validation_start")
    now_s[0] += 50.0
    run.say("on_validation_end")
    now_s[0] += 2.0
    run.batch(has_backward=True, steps=True)
    run.say("on_train_end")
    records = records_in(tmp_path / "j" / "rank-00000.ring")
    (ended,) = (r for r in records if isinstance(r, StepRecord))
    assert ended.duration_s == 2.0


def test_it_is_a_callback_and_can_be_handed_to_processes_that_are_spawned() -> None:
    watch = Pacekeeper(job="j", role="train")
    assert {Callback, Pacekeeper} <= set(type(watch).__mro__)
    make, nothing = watch.__reduce__()
    assert nothing == ()
    again: Any = make()
    assert {Callback, Pacekeeper} <= set(type(again).__mro__)
    assert again._options["job"] == "j"


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [({"input_ids": IDS}, 12), ((IDS.float(), IDS), 12), (IDS, 12), (IDS.float(), 0), (None, 0)],
)
def test_work_is_told_of_batches_that_name_their_tokens(
    tmp_path: Path, batch: Any, tokens: int
) -> None:
    run = Run(tmp_path, is_automatic=True, is_wrapped=False)
    run.say("on_train_start")
    run.say("on_train_batch_start", batch, 0)
    run.module.training_step(batch, 0).backward()
    run.say("on_train_end")
    (record, *_) = records_in(tmp_path / "j" / "rank-00000.ring")
    assert isinstance(record, MicroBatchRecord) and record.tokens == tokens


def test_where_deepspeed_drives_the_passes_steps_are_told_alone(tmp_path: Path) -> None:
    run = Run(tmp_path, is_automatic=True, is_wrapped=False)
    made = type("DeepSpeedStrategy", (SimpleNamespace,), {})
    run.trainer.strategy = made(**vars(run.trainer.strategy))
    run.say("on_train_start")
    run.batch(has_backward=True, steps=True)
    run.say("on_train_end")
    (record,) = records_in(tmp_path / "j" / "rank-00000.ring")
    assert isinstance(record, StepRecord) and record.step == 0


def test_a_wrong_job_is_said_when_it_is_made_and_trouble_later_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="job name"):
        Pacekeeper(job="not a name")
    monkeypatch.setattr(pytorch, "attach", None)
    run = Run(tmp_path, is_automatic=True, is_wrapped=False)
    run.say("on_train_start")
    assert run.watch.pace is None
    run.batch(has_backward=True, steps=True)
