"""The one line to attach: steps of the optimizer, micro-batches of the model, and what wins."""

import copy
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import pacekeeper
from pacekeeper.core.telemetry.records import ExpertLoadRecord, MicroBatchRecord, StepRecord
from pacekeeper.trainer.adapters import pytorch
from pacekeeper.trainer.adapters.instrumentation import module_passes, training_watch
from support.foreign_models import TinyModel, attached, told_by

IDS = torch.arange(12).reshape(3, 4)


class Lossy(TinyModel):
    """Returns its loss as nanoGPT does: after the logits."""

    def forward(self, ids: Tensor) -> Any:
        logits = super().forward(ids)["logits"]
        return logits, logits.square().mean()


class Trained(Lossy):
    """A Lightning module, as far as it is looked at."""

    def training_step(self, ids: Tensor) -> Any:
        return self(ids)[1]


class Loop:
    """A plain training loop."""

    def __init__(self, directory: Path, model: nn.Module | None = None, **more: Any) -> None:
        self.model = Lossy() if model is None else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.0)
        self.pace = attached(directory, self.model, self.optimizer, **more)

    def batch(self, ids: Tensor = IDS) -> None:
        self.model(ids)[1].backward()

    def step(self, batches: int = 1) -> None:
        for _ in range(batches):
            self.batch()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def told(self) -> list[tuple[int, int, int]]:
        """(step, its micro-batches, their tokens), of the steps that ended."""
        records = told_by(self.pace)
        batches = [r for r in records if isinstance(r, MicroBatchRecord)]
        found = []
        for step in self.steps():
            own = [r for r in batches if r.step == step.step]
            assert [r.micro_batch for r in own] == list(range(len(own)))
            found.append((step.step, len(own), sum(r.tokens for r in own)))
        return found

    def steps(self) -> list[StepRecord]:
        return [r for r in told_by(self.pace) if isinstance(r, StepRecord)]


def test_accumulated_gradients_are_micro_batches_of_the_optimizers_step(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.step(3)
    loop.model.eval()
    loop.model(IDS)  # an evaluation between the steps
    loop.model.train()
    with torch.no_grad():
        loop.model(IDS)
    loop.step(2)
    assert loop.told() == [(0, 3, 36), (1, 2, 24)]
    loop.pace.detach()
    loop.step()
    assert not loop.model._forward_hooks and not loop.optimizer._optimizer_step_post_hooks


def test_it_is_one_line_and_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pacekeeper.attach is pytorch.attach
    monkeypatch.setenv("PACEKEEPER_JOB", "mine")
    monkeypatch.setenv("PACEKEEPER_RING_DIR", str(tmp_path))
    model = Lossy()
    pace = pacekeeper.attach(model, torch.optim.SGD(model.parameters(), 0.1))
    pace.detach()
    assert pace.ring.path == tmp_path / "mine" / "rank-00000.ring"


def test_experts_and_the_loss_on_the_host_are_reported(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    expected = float(loop.model(IDS)[1].detach())
    loop.step(2)
    (step,) = loop.steps()
    assert step.loss == pytest.approx(expected)
    loads = [r for r in told_by(loop.pace) if isinstance(r, ExpertLoadRecord)]
    # The forward pass above had no backward; the next one made it a part of its micro-batch.
    assert [(r.step, sum(r.counts)) for r in loads] == [(0, 3 * IDS.numel() * 2)]
    loop.pace.detach()


def test_a_forward_without_a_backward_is_a_part_of_the_next_micro_batch(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.model(IDS)
    loop.step()
    assert loop.told() == [(0, 1, 24)]
    loop.pace.detach()


def test_what_blocks_tell_wins_and_the_rest_is_inferred(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.step()
    with loop.pace.step(7, tokens=1000) as result:
        with loop.pace.micro_batch_timer(tokens=5):
            loop.batch()
            loop.batch()
        loop.batch()
        loop.optimizer.step()
        loop.optimizer.step()
        result.loss = 2.5
    loop.step()
    with loop.pace.micro_batch_timer(tokens=6):
        loop.batch()
        loop.optimizer.step()
    assert loop.told() == [(0, 1, 12), (7, 2, 5 + 12), (8, 1, 12), (9, 1, 6)]
    assert [(r.tokens, r.loss == 2.5) for r in loop.steps()][1] == (1000, True)
    loop.pace.detach()


def test_rows_that_are_told_take_the_place_of_those_that_hooks_see(tmp_path: Path) -> None:
    pace = attached(tmp_path)
    for told in (True, False):
        with pace.step(int(told)), pace.micro_batch_timer(tokens=1) as batch:
            pace.reporter.add_expert_rows([4, 4])
            if told:
                batch.add_expert_rows([1, 2])
                pace.reporter.add_expert_rows([4])
    batches = [r for r in told_by(pace) if isinstance(r, MicroBatchRecord)]
    assert [(r.expert_rows, r.num_active_experts) for r in batches] == [(3, 2), (8, 2)]
    pace.detach()


def test_the_last_of_several_optimizers_ends_the_step(tmp_path: Path) -> None:
    models = Lossy(), Lossy()
    first, second = (torch.optim.SGD(model.parameters(), 0.0) for model in models)
    pace = attached(tmp_path, models, [first, second])
    for _ in range(2):
        for model, optimizer in zip(models, (first, second), strict=True):
            model(IDS)[1].backward()
            optimizer.step()
    records = told_by(pace)
    assert [(r.step, r.micro_batch) for r in records if isinstance(r, MicroBatchRecord)] == [
        (0, 0), (0, 1), (1, 0), (1, 1)
    ]  # fmt: skip
    assert [r.step for r in records if isinstance(r, StepRecord)] == [0, 1]
    pace.detach()


def test_models_that_one_backward_passes_through_share_a_micro_batch(tmp_path: Path) -> None:
    models = Lossy(), Lossy()
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], 0.0)
    pace = attached(tmp_path, models, optimizer)
    (models[0](IDS)[1] + models[1](IDS)[1]).backward()
    optimizer.step()
    (batch,) = (r for r in told_by(pace) if isinstance(r, MicroBatchRecord))
    assert batch.tokens == 24
    pace.detach()


def test_an_optimizer_that_steps_within_the_backward_pass_ends_the_step_after_it(
    tmp_path: Path,
) -> None:
    model = Lossy()
    last = model.embedding.weight
    optimizer = torch.optim.SGD([last], 0.0)
    last.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
    pace = attached(tmp_path, model, optimizer)
    for _ in range(2):
        model(IDS)[1].backward()
    kinds = [type(r).__name__ for r in told_by(pace) if not isinstance(r, ExpertLoadRecord)]
    assert kinds == ["MicroBatchRecord", "StepRecord"] * 2
    pace.detach()


def test_a_step_of_an_optimizer_that_computed_nothing_is_no_step(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.step()
    loop.optimizer.step()  # as DeepSpeed does for each of its groups
    loop.step()
    assert loop.told() == [(0, 1, 12), (1, 1, 12)]
    loop.pace.detach()


def test_without_an_optimizer_steps_are_told_by_the_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Lossy()
    pace = attached(tmp_path, model)
    for _ in range(2):
        model(IDS)[1].backward()
    assert told_by(pace) == []
    assert ["outside of a step" in record.message for record in caplog.records] == [True]
    with pace.step(4):
        model(IDS)[1].backward()
    assert [r.step for r in told_by(pace) if isinstance(r, StepRecord)] == [4]
    pace.detach()


def test_an_optimizer_that_never_steps_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(training_watch, "MANY", 2)
    loop = Loop(tmp_path)
    for _ in range(5):
        loop.batch()
    assert loop.told() == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    loop.pace.detach()
    assert len([r for r in told_by(loop.pace) if isinstance(r, MicroBatchRecord)]) == 5


def test_a_model_that_is_never_called_leaves_steps_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path)
    for _ in range(3):
        loop.optimizer.step()
    assert loop.told() == [(0, 0, 0), (1, 0, 0)]  # the first one's beginning is not known
    assert len(caplog.records) == 1
    loop.step()  # from now on
    assert loop.told()[2:] == [(2, 1, 12)]
    loop.pace.detach()


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_model_without_a_backward_pass_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_frozen: bool
) -> None:
    backbone, head = TinyModel(is_frozen=is_frozen), nn.Linear(8, 1)
    optimizer = torch.optim.SGD(head.parameters(), 0.0)
    pace = attached(tmp_path, backbone, optimizer)
    for _ in range(2):
        head(backbone(IDS)["logits"]).sum().backward()
        optimizer.step()
    records = told_by(pace)
    assert [r.step for r in records if isinstance(r, StepRecord)] == [0, 1]
    assert any(isinstance(r, MicroBatchRecord) for r in records) is not is_frozen
    assert ["no backward pass" in r.message for r in caplog.records] == [True] * is_frozen
    pace.detach()


def test_a_told_micro_batch_needs_no_backward_pass(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path)
    with loop.pace.micro_batch_timer(tokens=6):
        pass
    loop.optimizer.step()
    assert loop.told() == [(0, 1, 6)] and not caplog.records
    loop.pace.detach()


def test_what_cannot_be_attached_is_refused_by_its_name(tmp_path: Path) -> None:
    model = Lossy()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    wrong: list[tuple[str, Any, Any, dict[str, Any]]] = [
        ("model", optimizer, model, {}),
        ("model", model.parameters(), optimizer, {}),
        ("model", "model", optimizer, {}),
        ("model", {"a": model}, optimizer, {}),
        ("model", Lossy, optimizer, {}),
        ("optimizer", model, model, {}),
        ("optimizer", model, "sgd", {}),
        ("optimizer", model, torch.optim.SGD, {}),
        ("optimizer", model, {"a": optimizer}, {}),
        ("step", model, optimizer, {"step": "5"}),
        ("step", model, optimizer, {"step": 5.0}),
    ]
    for name, *parts, more in wrong:
        with pytest.raises(TypeError, match=f"^{name}"):
            attached(tmp_path, *parts, **more)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_alone_is_not_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    found = []
    for given in ({"rank": 3}, {"world_size": 2}, {}):
        pace = attached(tmp_path, **given)
        pace.detach()
        found.append(pace.rank)
    assert found == [3, 1, 1]
    with pytest.raises(ValueError, match="rank 1 is not in a world of 1"):
        attached(tmp_path, world_size=1)


def test_tokens_that_are_not_known_are_said_and_not_guessed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    pace = attached(tmp_path, model, optimizer)
    for _ in range(2):
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
    assert {r.tokens for r in told_by(pace) if isinstance(r, MicroBatchRecord)} == {0}
    assert len(caplog.records) == 1
    pace.detach()


def test_attached_twice_the_first_one_ends(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.step()
    again = attached(tmp_path, loop.model, loop.optimizer)
    loop.step()
    assert not loop.pace.ring.is_armed
    assert again.ring.run_id > loop.pace.ring.run_id
    assert [r.step for r in told_by(again) if isinstance(r, StepRecord)] == [0]
    other = attached(tmp_path, loop.model, loop.optimizer, job="other")
    loop.step()
    for pace in (again, other):
        assert [r for r in told_by(pace) if isinstance(r, StepRecord)][-1].tokens == 0
        pace.detach()


def test_a_resumed_run_goes_on_with_its_number(tmp_path: Path) -> None:
    loop = Loop(tmp_path, step=40)
    loop.step()
    loop.step()
    assert [step for step, *_ in loop.told()] == [40, 41]
    loop.pace.detach()
    numbers = iter((3, 9))
    loop = Loop(tmp_path, step=lambda: next(numbers))
    loop.step()
    loop.step()
    assert [step for step, *_ in loop.told()] == [3, 9]
    loop.pace.detach()


def test_waits_for_batches_are_reported_without_an_evaluations(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    rows: Any = IDS.repeat(8, 1)
    batches = iter(DataLoader(rows, batch_size=3))
    loop.batch(next(batches))
    loop.optimizer.step()
    loop.batch(next(batches))
    loop.optimizer.step()
    loop.model.eval()
    loop.model(next(batches))
    loop.model.train()
    loop.batch(next(iter(DataLoader(rows, batch_size=3))))
    loop.optimizer.step()
    with loop.pace.loading():
        loop.batch(next(batches))
    loop.optimizer.step()
    waits = [r.input_wait_s for r in loop.steps()]
    assert [wait is not None for wait in waits] == [False, True, False, True]
    loop.pace.detach()


def test_an_evaluation_in_the_middle_of_a_step_is_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    loop = Loop(tmp_path)
    loop.batch()
    loop.model.eval()
    loop.model(IDS)
    now_s[0] += 50.0
    loop.model.train()
    loop.batch()
    now_s[0] += 2.0
    loop.model.eval()
    loop.model(IDS)
    now_s[0] += 70.0
    loop.optimizer.step()
    assert [r.duration_s for r in loop.steps()] == [2.0]
    loop.pace.detach()


def test_wrapped_optimizers_are_unwrapped_and_others_are_wrapped(tmp_path: Path) -> None:
    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def step(self) -> None:
            self.optimizer.step()

    class Own:
        def step(self) -> str:
            return "done"

    model = Lossy()
    for optimizer in (Wrapper(torch.optim.SGD(model.parameters(), 0.0)), Own()):
        pace = attached(tmp_path, model, optimizer)
        model(IDS)[1].backward()
        assert optimizer.step() == (None if isinstance(optimizer, Wrapper) else "done")
        assert [r.step for r in told_by(pace) if isinstance(r, StepRecord)] == [0]
        pace.detach()
        assert "step" not in vars(optimizer)


def test_hooks_never_raise_into_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("ours")

    loop = Loop(tmp_path)
    for name in ("enter_pass", "suspend_pass", "begin_step", "end_step", "add_features"):
        monkeypatch.setattr(loop.pace.reporter, name, broken)
    for _ in range(3):
        loop.step()
    assert loop.pace.ring.num_errors >= 3
    loop.pace.detach()


def test_blocks_never_raise_into_training(tmp_path: Path) -> None:
    def no_number() -> int:
        raise RuntimeError("the trainer's")

    for number, step in (("5", 0), (5, no_number)):
        loop = Loop(tmp_path, step=step)
        wrong: Any = number
        with loop.pace.step(wrong), loop.pace.micro_batch_timer(tokens=1):
            loop.batch()
        with loop.pace.micro_batch_timer(tokens=1):
            loop.batch()
        assert loop.pace.ring.num_errors >= 1
        loop.pace.detach()


def handed_over(module: Any) -> Any:
    """The module as a process that is spawned gets it."""
    return ForkingPickler.loads(ForkingPickler.dumps(module))


def test_a_model_can_be_copied_and_pickled_while_it_is_attached(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    copied: Any = copy.deepcopy(loop.model)
    for other in (copied, handed_over(loop.model)):
        other(IDS)[1].backward()  # of another model: not reported
        assert other.embedding.weight.grad is not None
    loop.step()
    assert loop.told() == [(0, 1, 12)]
    loop.pace.detach()


def test_a_copy_of_a_lightning_module_has_its_own_training_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_passes, "_LIGHTNING", (__name__,))
    module = Trained()
    optimizer = torch.optim.SGD(module.parameters(), 0.0)
    pace = attached(tmp_path, module, optimizer)
    for other in (copy.deepcopy(module), handed_over(module)):
        other.training_step(IDS).backward()
        assert module.embedding.weight.grad is None
        assert other.embedding.weight.grad is not None
    assert told_by(pace) == []
    module.training_step(IDS).backward()
    optimizer.step()
    assert [r.step for r in told_by(pace) if isinstance(r, StepRecord)] == [0]
    pace.detach()
