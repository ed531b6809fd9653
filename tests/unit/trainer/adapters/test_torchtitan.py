"""torchtitan's adapter by the order of a trainer's calls, whose names are those of 0.3."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pacekeeper.core.telemetry.records import ExpertLoadRecord, MicroBatchRecord, StepRecord
from pacekeeper.trainer.adapters import torchtitan
from pacekeeper.trainer.adapters.torchtitan import TrainerWatch
from support.rings import records_in
from support.torchtitan_calls import MoE, OldMoE, Trainer, batches_of


@pytest.fixture
def watched(tmp_path: Path) -> Callable[[Any], TrainerWatch]:
    return lambda trainer: torchtitan.watch(trainer, job="job", ring_dir=str(tmp_path))


def told(watch: TrainerWatch, kind: type[Any]) -> list[Any]:
    ring = watch.reporter.pace.ring
    assert ring.num_errors == 0, ring.reason
    assert ring.path is not None
    return [record for record in records_in(ring.path) if isinstance(record, kind)]


@pytest.mark.parametrize("moe", [MoE, OldMoE])
def test_steps_passes_rows_and_loads_are_told(
    watched: Callable[[Any], TrainerWatch], moe: type[nn.Module]
) -> None:
    trainer = Trainer(moe)
    trainer.step = 500  # a checkpoint was loaded
    watch = watched(trainer)
    trainer.train(batches_of((1, 4), (2, 3), (1, 8), (1, 5)), 2)
    batches = told(watch, MicroBatchRecord)
    assert [(r.step, r.micro_batch, r.tokens, r.sum_len_squared) for r in batches] == [
        (501, 0, 4, 16),
        (501, 1, 6, 18),
        (502, 0, 8, 64),
        (502, 1, 5, 25),
    ]
    assert [(r.expert_rows, r.num_active_experts) for r in batches] == [
        (4, 2),
        (6, 2),
        (8, 2),
        (5, 2),
    ]
    steps = told(watch, StepRecord)
    assert [(r.step, r.loss, r.tokens) for r in steps] == [(501, None, 0), (502, 2.5, 0)]
    assert all(r.input_wait_s is not None for r in steps)
    loads = told(watch, ExpertLoadRecord)
    assert [(r.step, r.layer, r.counts) for r in loads] == [(501, 3, (8, 2)), (502, 3, (11, 2))]


def test_validation_is_not_told(watched: Callable[[Any], TrainerWatch]) -> None:
    trainer = Trainer()
    watch = watched(trainer)
    batches = batches_of(*[(1, 4)] * 4)
    trainer.train(batches, 1)
    trainer.validate()
    trainer.train(batches, 1)
    assert [r.tokens for r in told(watch, MicroBatchRecord)] == [4] * 4
    assert [r.counts for r in told(watch, ExpertLoadRecord)] == [(6, 2)] * 2


def test_a_step_that_ran_out_of_data_is_not_told(watched: Callable[[Any], TrainerWatch]) -> None:
    trainer = Trainer()
    watch = watched(trainer)
    trainer.train(batches_of((1, 4), (1, 4), (1, 4)), 5)
    assert [r.step for r in told(watch, StepRecord)] == [1]
    assert len(told(watch, MicroBatchRecord)) == 2


def test_a_step_that_raises_leaves_nothing_behind(watched: Callable[[Any], TrainerWatch]) -> None:
    trainer = Trainer()
    watch = watched(trainer)
    trainer.fails = True
    with pytest.raises(ConnectionError):
        trainer.train(batches_of((1, 4), (1, 6)), 1)
    trainer.step, trainer.fails = 0, False
    trainer.train(batches_of((1, 8), (1, 5)), 1)
    assert [r.tokens for r in told(watch, MicroBatchRecord)] == [8, 5]
    assert [r.step for r in told(watch, StepRecord)] == [1]


def test_a_pipelines_micro_batches_are_one_record(watched: Callable[[Any], TrainerWatch]) -> None:
    trainer = Trainer(pp=2, tp=2)
    watch = watched(trainer)
    trainer.train(batches_of((1, 4), (1, 6)), 1)
    (batch,) = told(watch, MicroBatchRecord)
    assert (batch.tokens, batch.sum_len_squared, batch.tensor_share) == (10, 52, 0.25)


def test_documents_count_where_attention_keeps_to_them(
    watched: Callable[[Any], TrainerWatch],
) -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [5, 6, 0, 1, 2]])
    batch = ({"input": torch.zeros(2, 5), "positions": positions}, torch.zeros(2, 5))
    trainer = Trainer(cp=1)
    trainer.accumulates = 1
    watch = watched(trainer)
    trainer.train(iter([batch]), 1)
    trainer.model_config.first_attention.inner_attention = SimpleNamespace()
    trainer.train(iter([batch]), 1)
    by_document, whole = told(watch, MicroBatchRecord)
    assert (by_document.tokens, by_document.sum_len_squared) == (10, 9 + 4 + 4 + 9)
    assert by_document.num_documents == 4
    assert (whole.sum_len_squared, whole.num_documents) == (50, 2)


def test_of_a_sequence_in_parts_this_rank_has_its_own(
    watched: Callable[[Any], TrainerWatch],
) -> None:
    trainer = Trainer(cp=4)
    trainer.accumulates = 1
    watch = watched(trainer)
    trainer.train(batches_of((1, 8)), 1)
    (batch,) = told(watch, MicroBatchRecord)
    assert (batch.tokens, batch.sum_len_squared) == (2, 16)


def compiled(trainer: Trainer) -> None:
    trainer.config.compile.enable = True


def graphed(trainer: Trainer) -> None:
    trainer.config.training.disable_cuda_graphs = False


def elsewhere(trainer: Trainer) -> None:
    trainer.device = torch.device("xpu")


@pytest.mark.parametrize("change", [compiled, graphed, elsewhere])
def test_where_passes_can_not_be_timed_steps_alone_are_told(
    watched: Callable[[Any], TrainerWatch], change: Callable[[Trainer], None]
) -> None:
    trainer = Trainer(ep=2)
    change(trainer)
    watch = watched(trainer)
    assert watch.untimed
    trainer.train(batches_of((1, 4), (1, 6)), 1)
    assert told(watch, MicroBatchRecord) == []
    assert told(watch, ExpertLoadRecord) == []
    (step,) = told(watch, StepRecord)
    assert step.tokens == 10 * 2 * 3  # of all ranks


def test_compiled_without_shared_experts_passes_are_told_and_no_hook_is_in_the_way(
    watched: Callable[[Any], TrainerWatch],
) -> None:
    trainer = Trainer()
    compiled(trainer)
    watch = watched(trainer)
    assert not any(m._forward_pre_hooks for m in trainer.model_parts[0].modules())
    trainer.train(batches_of((1, 4), (1, 6)), 1)
    assert [r.tokens for r in told(watch, MicroBatchRecord)] == [4, 6]


def test_closed_the_trainer_is_as_it_was(watched: Callable[[Any], TrainerWatch]) -> None:
    trainer = Trainer()
    before, logs = dict(vars(trainer)), trainer.metrics_processor.log
    watch = watched(trainer)
    assert vars(trainer) != before
    assert trainer.train_step(batches_of((1, 4), (1, 4))) == "done"
    watch.close()
    assert vars(trainer) == before
    assert trainer.metrics_processor.log is logs
    assert not any(m._forward_pre_hooks for m in trainer.model_parts[0].modules())
