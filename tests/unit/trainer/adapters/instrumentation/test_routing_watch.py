"""Tokens per expert: as the routers chose, once per step, not again when they are recomputed."""

from pathlib import Path

import pytest
import torch

from pacekeeper.core.telemetry.records import ExpertLoadRecord
from pacekeeper.trainer.adapters.instrumentation import expert_load
from pacekeeper.trainer.adapters.instrumentation.expert_load import RoutingWatch, routers_of
from pacekeeper.trainer.adapters.instrumentation.module_passes import PassWatch
from pacekeeper.trainer.adapters.reporter import NO_FEATURES, StepReporter
from support.foreign_models import TinyModel, host_teller, told_by

IDS = torch.arange(12).reshape(3, 4)


def train(reporter: StepReporter, model: TinyModel, routing: RoutingWatch, steps: int = 1) -> None:
    for step in range(steps):
        reporter.begin_step(step)
        for _ in range(2):
            model(input_ids=IDS)["logits"].sum().backward()
        routing.end_step()
        reporter.end_step()


def loads(reporter: StepReporter) -> list[ExpertLoadRecord]:
    return [record for record in told_by(reporter) if isinstance(record, ExpertLoadRecord)]


def watched(directory: Path) -> tuple[StepReporter, TinyModel, RoutingWatch]:
    reporter, model = host_teller(directory), TinyModel()
    PassWatch(reporter, model, lambda args, kwargs: NO_FEATURES)
    return reporter, model, RoutingWatch(reporter, model)


def test_the_choices_of_all_micro_batches_of_a_step_are_counted_once(tmp_path: Path) -> None:
    reporter, model, routing = watched(tmp_path)
    with torch.no_grad():
        model(input_ids=IDS)  # no training: not counted
    hidden = model.embedding(IDS).reshape(-1, 8)
    chosen = model.router(hidden)[1]
    expected = 2 * torch.bincount(chosen.flatten(), minlength=4)
    train(reporter, model, routing, steps=2)
    first, second = loads(reporter)
    assert (first.layer, first.step, list(first.counts)) == (0, 0, expected.tolist())
    assert (second.step, second.counts) == (1, first.counts)
    routing.close()
    train(reporter, model, routing)
    assert len(loads(reporter)) == 2


def test_a_pass_that_is_recomputed_is_not_counted_again(tmp_path: Path) -> None:
    reporter, model, routing = watched(tmp_path)
    model.recomputes = True
    train(reporter, model, routing)
    (load,) = loads(reporter)
    assert sum(load.counts) == 2 * 12 * 2


def test_an_abandoned_step_leaves_its_counts_to_nobody(tmp_path: Path) -> None:
    reporter, model, routing = watched(tmp_path)
    reporter.begin_step(0)
    model(input_ids=IDS)["logits"].sum().backward()
    reporter.abandon_step()
    routing.abandon_step()
    train(reporter, model, routing)
    (load,) = loads(reporter)
    assert sum(load.counts) == 2 * 12 * 2


def test_a_router_that_hides_its_choice_is_untold(tmp_path: Path) -> None:
    reporter, model, routing = watched(tmp_path)
    model.router.register_forward_hook(lambda module, args, output: output)
    reporter.begin_step(0)
    reporter.begin_microbatch()
    for output in (torch.zeros(3, 4), (torch.zeros(3, 4), torch.zeros(3, 2)), None):
        routing.saw(0, 4, output)
    routing.saw(0, 4, (torch.zeros(3, 2, dtype=torch.int64),) * 2)  # which of the two?
    routing.end_step()
    assert loads(reporter) == []


def test_layers_of_a_model_that_is_too_large_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_load, "MAX_RECORDS_PER_STEP", 1)
    reporter, _, routing = watched(tmp_path)
    for step in range(4):
        reporter.begin_step(step)
        reporter.begin_microbatch()
        for layer, experts in enumerate((3, 5)):
            routing.saw(layer, experts, torch.zeros(2, 2, dtype=torch.int64))
        routing.end_step()
        reporter.end_microbatch()
        reporter.end_step()
    assert [(one.step, one.layer, len(one.counts)) for one in loads(reporter)] == [
        (0, 0, 3), (1, 1, 5), (2, 0, 3), (3, 1, 5)
    ]  # fmt: skip


def test_routers_are_known_by_name_and_by_what_they_hold() -> None:
    class ForgetGate(torch.nn.Module):
        pass

    model = torch.nn.Sequential(TinyModel(num_experts=3), ForgetGate(), TinyModel(num_experts=5))
    assert [experts for _, experts in routers_of(model)] == [3, 5]
