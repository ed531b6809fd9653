"""Tokens per expert: as the routers chose, once per step, not again when they are recomputed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pacekeeper.core.telemetry.records import ExpertLoadRecord
from pacekeeper.trainer.adapters.instrumentation import expert_load
from pacekeeper.trainer.adapters.instrumentation.expert_hooks import counts_in, watch_experts
from pacekeeper.trainer.adapters.pytorch import TorchHooks
from support.foreign_models import TinyModel, attached, told_by

IDS = torch.arange(12).reshape(3, 4)


def train(pace: TorchHooks, model: TinyModel, steps: int = 1) -> None:
    for step in range(steps):
        with pace.step(step):
            for _ in range(2):
                model(input_ids=IDS)["logits"].sum().backward()


def loads(pace: TorchHooks) -> list[ExpertLoadRecord]:
    return [record for record in told_by(pace) if isinstance(record, ExpertLoadRecord)]


def test_the_choices_of_all_micro_batches_of_a_step_are_counted_once(tmp_path: Path) -> None:
    model = TinyModel()
    pace = attached(tmp_path, model)
    with torch.no_grad():
        model(input_ids=IDS)  # no training: not counted
    hidden = model.embedding(IDS).reshape(-1, 8)
    chosen = model.router(hidden)[1]
    expected = 2 * torch.bincount(chosen.flatten(), minlength=4)
    train(pace, model, steps=2)
    first, second = loads(pace)
    assert (first.layer, first.step, list(first.counts)) == (0, 0, expected.tolist())
    assert (second.step, second.counts) == (1, first.counts)
    pace.detach()
    assert not model.router._forward_hooks


def test_a_pass_that_is_recomputed_is_not_counted_again(tmp_path: Path) -> None:
    model = TinyModel()
    pace = attached(tmp_path, model)
    model.recomputes = True
    train(pace, model)
    (load,) = loads(pace)
    assert sum(load.counts) == 2 * 12 * 2
    pace.detach()


def test_an_abandoned_step_leaves_its_counts_to_nobody(tmp_path: Path) -> None:
    model = TinyModel()
    pace = attached(tmp_path, model)
    with pytest.raises(KeyError), pace.step(0):
        model(input_ids=IDS)["logits"].sum().backward()
        raise KeyError
    train(pace, model)
    (load,) = loads(pace)
    assert sum(load.counts) == 2 * 12 * 2
    pace.detach()


CHOSEN = torch.tensor([[0, 2], [2, 1], [2, 0]])


@pytest.mark.parametrize(
    ("output", "counts"),
    [
        (torch.zeros(3, 4), None),
        ((torch.zeros(3, 4), torch.zeros(3, 2)), None),
        (None, None),
        ((CHOSEN, CHOSEN), None),  # which of the two?
        ((torch.zeros(3, 4), CHOSEN), [2, 1, 3, 0]),
        ((torch.zeros(3, 4), torch.eye(4, dtype=torch.bool)), [1, 1, 1, 1]),
        ((torch.zeros(()), CHOSEN, torch.tensor([5, 1, 0, 0])), [5, 1, 0, 0]),
        ((torch.zeros(3, 4), torch.zeros(3)), None),  # one for each token
    ],
)
def test_counts_are_read_off_a_router_as_far_as_it_holds_them(
    output: Any, counts: list[int] | None
) -> None:
    found = counts_in(output, 4)
    assert (None if found is None else found.tolist()) == counts


def test_layers_of_a_model_that_is_too_large_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_load, "MAX_RECORDS_PER_STEP", 1)
    pace = attached(tmp_path)
    for step in range(4):
        with pace.step(step), pace.micro_batch_timer(tokens=1):
            for layer, experts in enumerate((3, 5)):
                pace.reporter.add_expert_loads(layer, torch.zeros(experts, dtype=torch.int64))
    assert [(one.step, one.layer, len(one.counts)) for one in loads(pace)] == [
        (0, 0, 3), (1, 1, 5), (2, 0, 3), (3, 1, 5)
    ]  # fmt: skip
    pace.detach()


def test_routers_are_known_by_name_and_by_what_they_hold(tmp_path: Path) -> None:
    class ForgetGate(torch.nn.Module):
        pass

    forget = ForgetGate()
    models = TinyModel(num_experts=3), TinyModel(num_experts=5)
    pace = attached(tmp_path)
    handles = watch_experts(pace.reporter, torch.nn.Sequential(models[0], forget, models[1]))
    assert len(handles) == 2
    assert not forget._forward_hooks
    assert all(model.router._forward_hooks for model in models)
    pace.detach()
