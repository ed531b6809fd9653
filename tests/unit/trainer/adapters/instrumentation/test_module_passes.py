"""A module's passes: computing is told when it is over, before anybody waits for other ranks."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, GradBucket
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pacekeeper.core.telemetry.records import MicroBatchRecord, StepRecord
from pacekeeper.trainer.adapters.instrumentation.batch_features import features_of_batch
from pacekeeper.trainer.adapters.instrumentation.expert_load import RoutingWatch
from pacekeeper.trainer.adapters.instrumentation.module_passes import (
    PassWatch,
    computes_alone,
    tensors_in,
)
from support.foreign_models import TinyModel, host_teller, told_by

IDS = torch.arange(12).reshape(3, 4)
PATIENCE_S = 60.0  # for what never comes


def work_of(args: tuple[Any, ...], kwargs: Any) -> Any:
    return features_of_batch(kwargs)


def kinds(records: list[Any]) -> list[str]:
    return [type(record).__name__.removesuffix("Record") for record in records]


def test_each_backward_pass_ends_a_micro_batch_with_its_work(tmp_path: Path) -> None:
    reporter, model = host_teller(tmp_path), TinyModel()
    watch = PassWatch(reporter, model, work_of)
    for step in range(2):
        reporter.begin_step(step)
        for _ in range(2):
            model(input_ids=IDS)["logits"].sum().backward()
        reporter.end_step()
    watch.close()
    model(input_ids=IDS)["logits"].sum().backward()
    records = told_by(reporter)
    assert kinds(records) == ["MicroBatch", "MicroBatch", "Step"] * 2
    batches = [r for r in records if isinstance(r, MicroBatchRecord)]
    assert {(r.tokens, r.sum_len_squared, r.num_documents) for r in batches} == {(12, 48, 3)}
    assert all(r.compute_s > 0.0 for r in batches)


def test_what_is_no_training_is_no_micro_batch(tmp_path: Path) -> None:
    reporter, model = host_teller(tmp_path), TinyModel()
    PassWatch(reporter, model, work_of)
    model(input_ids=IDS)["logits"].sum().backward()  # before any step
    reporter.begin_step(0)
    with torch.no_grad():
        model(input_ids=IDS)
    model.eval()
    model(input_ids=IDS)["logits"].sum().backward()
    model.train()
    model(input_ids=IDS)  # no backward pass
    reporter.end_step()
    assert kinds(told_by(reporter)) == ["Step"]


def test_a_model_that_learns_nothing_has_its_steps_told(tmp_path: Path) -> None:
    reporter, model = host_teller(tmp_path), TinyModel(is_frozen=True)
    PassWatch(reporter, model, work_of)
    reporter.begin_step(0)
    model(input_ids=IDS)
    reporter.end_step()
    assert kinds(told_by(reporter)) == ["Step"]


@pytest.mark.parametrize("how", ["module", "wrapped", "forward", "layer", "later"])
def test_a_compiled_graph_stays_whole_and_its_passes_are_told(tmp_path: Path, how: str) -> None:
    """`fullgraph=True` fails where anything in it can not be traced."""
    torch._dynamo.reset()
    graphs: Any = CompileCounter()
    whole = {"backend": graphs, "fullgraph": True}
    reporter, model = host_teller(tmp_path), TinyModel()
    called: Any = model
    match how:
        case "module":
            model.compile(**whole)
        case "wrapped":
            called = torch.compile(model, **whole)
        case "forward":
            setattr(model, "forward", torch.compile(model.forward, **whole))  # noqa: B010
        case "layer":
            model.router.compile(**whole)
    watch, routing = PassWatch(reporter, called, work_of), RoutingWatch(reporter, model)
    if how == "later":
        model.router.compile(**whole)
    for step in range(2):
        reporter.begin_step(step)
        called(input_ids=IDS)["logits"].sum().backward()
        reporter.end_step()
    watch.close()
    routing.close()
    called(input_ids=IDS)["logits"].sum().backward()
    records = told_by(reporter)
    assert kinds(records) == ["MicroBatch", "Step"] * 2
    assert {r.tokens for r in records if isinstance(r, MicroBatchRecord)} == {12}
    assert graphs.frame_count <= 2, "traced again where its hooks are gone"
    assert reporter.pace.ring.num_errors == 0


def test_passes_that_share_a_backward_are_one_micro_batch(tmp_path: Path) -> None:
    reporter, model = host_teller(tmp_path), TinyModel()
    PassWatch(reporter, model, work_of)
    reporter.begin_step(0)
    both = model(input_ids=IDS)["logits"].sum() + model(input_ids=IDS)["logits"].sum()
    both.backward(retain_graph=True)
    both.backward()  # again: computed, and told already
    reporter.end_step()
    batch, ended = told_by(reporter)
    assert isinstance(batch, MicroBatchRecord) and isinstance(ended, StepRecord)
    assert (batch.tokens, batch.num_documents) == (24, 6)


def test_a_pass_that_its_own_backward_does_again_is_not_counted_twice(tmp_path: Path) -> None:
    reporter, model = host_teller(tmp_path), TinyModel()
    PassWatch(reporter, model, work_of)
    reporter.begin_step(0)
    again = torch.utils.checkpoint.checkpoint(model, input_ids=IDS, use_reentrant=False)
    again["logits"].sum().backward()
    (batch,) = told_by(reporter)
    assert isinstance(batch, MicroBatchRecord) and batch.tokens == 12


def test_where_ranks_wait_for_each_other_inside_a_pass_it_can_not_be_timed(group: None) -> None:
    assert computes_alone(TinyModel())
    sharded: Any = fully_shard(TinyModel(), mesh=init_device_mesh("cpu", (1,)))
    assert not computes_alone(sharded)


def test_work_that_can_not_be_read_is_untold_and_counted(tmp_path: Path) -> None:
    reporter, model = host_teller(tmp_path), TinyModel()

    def unreadable(args: Any, kwargs: Any) -> Any:
        raise KeyError("input_ids")

    PassWatch(reporter, model, unreadable)
    reporter.begin_step(0)
    model(input_ids=IDS)["logits"].sum().backward()
    assert reporter.pace.ring.num_errors == 1
    reporter.pace.ring.num_errors = 0
    (batch,) = told_by(reporter)
    assert isinstance(batch, MicroBatchRecord) and batch.tokens == 0


def test_tensors_are_found_where_models_put_them() -> None:
    one, two = torch.zeros(1), torch.ones(1)
    assert list(tensors_in({"a": one, "b": [two, None], "c": 3})) == [one, two]
    assert list(tensors_in(((((one,),),),))) == []


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    store = FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_wait_for_the_gradients_of_others_is_no_computing(
    tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum over ranks is held back until the micro-batch was told."""
    reporter, model = host_teller(tmp_path / "ring"), TinyModel()
    PassWatch(reporter, model, work_of)
    wrapped = DistributedDataParallel(model)
    held: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []
    original, in_time = reporter.pace.on_microbatch_end, []

    def hold(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        held.append((future, bucket.buffer()))
        late = threading.Timer(PATIENCE_S, release)  # where nobody tells anything
        late.daemon = True
        late.start()
        return future

    def release() -> None:
        while held:
            future, buffer = held.pop()
            future.set_result(buffer)

    def told(*what: Any) -> None:
        original(*what)
        in_time.append(bool(held))
        release()

    monkeypatch.setattr(reporter.pace, "on_microbatch_end", told)
    wrapped.register_comm_hook(None, hold)
    for step in range(3):
        reporter.begin_step(step)
        wrapped(input_ids=IDS)["logits"].sum().backward()
        reporter.end_step()
    assert in_time == [True] * 3
    assert kinds(told_by(reporter)) == ["MicroBatch", "Step"] * 3
