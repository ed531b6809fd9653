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
from torch.nn.parallel import DistributedDataParallel

from pacekeeper.core.telemetry.records import MicroBatchRecord, StepRecord
from pacekeeper.trainer.adapters.instrumentation.module_passes import tensors_in
from support.foreign_models import TinyModel, attached, told_by

IDS = torch.arange(12).reshape(3, 4)
PATIENCE_S = 60.0  # for what never comes


def kinds(records: list[Any]) -> list[str]:
    return [type(record).__name__.removesuffix("Record") for record in records]


def test_each_backward_pass_ends_a_micro_batch_with_its_work(tmp_path: Path) -> None:
    model = TinyModel()
    pace = attached(tmp_path, model)
    for step in range(2):
        with pace.step(step):
            for _ in range(2):
                model(input_ids=IDS)["logits"].sum().backward()
    records = told_by(pace)
    pace.detach()
    model(input_ids=IDS)["logits"].sum().backward()
    assert kinds(records) == ["MicroBatch", "MicroBatch", "ExpertLoad", "Step"] * 2
    batches = [r for r in records if isinstance(r, MicroBatchRecord)]
    assert {(r.tokens, r.sum_len_squared, r.num_documents) for r in batches} == {(12, 48, 3)}
    assert all(r.compute_s > 0.0 for r in batches)
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_what_is_no_training_is_no_micro_batch(tmp_path: Path) -> None:
    model = TinyModel()
    pace = attached(tmp_path, model)
    model(input_ids=IDS)["logits"].sum().backward()  # before any step
    with pace.step(0):
        with torch.no_grad():
            model(input_ids=IDS)
        model.eval()
        model(input_ids=IDS)["logits"].sum().backward()
        model.train()
        model(input_ids=IDS)  # no backward pass
    assert kinds(told_by(pace)) == ["ExpertLoad", "Step"]
    pace.detach()


def test_a_model_that_learns_nothing_has_its_steps_told(tmp_path: Path) -> None:
    model = TinyModel(is_frozen=True)
    pace = attached(tmp_path, model)
    with pace.step(0):
        model(input_ids=IDS)
    assert kinds(told_by(pace)) == ["ExpertLoad", "Step"]
    pace.detach()


@pytest.mark.parametrize("how", ["module", "wrapped", "forward", "layer", "later"])
def test_a_compiled_graph_stays_whole_and_its_passes_are_told(tmp_path: Path, how: str) -> None:
    """`fullgraph=True` fails where anything in it can not be traced."""
    torch._dynamo.reset()
    graphs: Any = CompileCounter()
    whole = {"backend": graphs, "fullgraph": True}
    model = TinyModel()
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
    pace = attached(tmp_path, called)
    if how == "later":
        model.router.compile(**whole)
    for step in range(2):
        with pace.step(step):
            called(input_ids=IDS)["logits"].sum().backward()
    records = told_by(pace)
    pace.detach()
    called(input_ids=IDS)["logits"].sum().backward()
    assert [kind for kind in kinds(records) if kind != "ExpertLoad"] == ["MicroBatch", "Step"] * 2
    assert {r.tokens for r in records if isinstance(r, MicroBatchRecord)} == {12}
    assert graphs.frame_count <= 2, "traced again where its hooks are gone"


def test_passes_that_share_a_backward_are_one_micro_batch(tmp_path: Path) -> None:
    model = TinyModel()
    pace = attached(tmp_path, model)
    with pace.step(0):
        both = model(input_ids=IDS)["logits"].sum() + model(input_ids=IDS)["logits"].sum()
        both.backward(retain_graph=True)
        both.backward()  # again: computed, and told already
    batch, _, ended = told_by(pace)
    assert isinstance(batch, MicroBatchRecord) and isinstance(ended, StepRecord)
    assert (batch.tokens, batch.num_documents) == (24, 6)
    pace.detach()


def test_a_pass_that_its_own_backward_does_again_is_not_counted_twice(tmp_path: Path) -> None:
    model = TinyModel()
    pace = attached(tmp_path, model)
    with pace.step(0):
        again = torch.utils.checkpoint.checkpoint(model, input_ids=IDS, use_reentrant=False)
        again["logits"].sum().backward()
    batch, _, _ = told_by(pace)
    assert isinstance(batch, MicroBatchRecord) and batch.tokens == 12
    assert pace.watch.num_passes == 1
    pace.detach()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_pass_that_raises_leaves_nothing_to_the_next_one(tmp_path: Path, where: str) -> None:
    model = TinyModel()
    pace = attached(tmp_path, model)
    with pace.step(0):
        if where == "backward":
            broken = model.embedding.weight.register_hook(lambda gradient: [][0])
        with pytest.raises(IndexError):
            model(input_ids=IDS + 16 * (where == "forward"))["logits"].sum().backward()
        if where == "backward":
            broken.remove()
        model(input_ids=IDS)["logits"].sum().backward()
    batches = [r for r in told_by(pace) if isinstance(r, MicroBatchRecord)]
    assert [(r.micro_batch, r.tokens) for r in batches] == [(0, 12)]
    pace.detach()


def test_work_that_can_not_be_read_is_untold_and_counted(tmp_path: Path) -> None:
    def unreadable(args: Any, kwargs: Any) -> Any:
        raise KeyError("input_ids")

    model = TinyModel()
    pace = attached(tmp_path, model, work_of=unreadable)
    with pace.step(0):
        model(input_ids=IDS)["logits"].sum().backward()
    assert pace.ring.num_errors == 1
    pace.ring.num_errors = 0
    batch, *_ = told_by(pace)
    assert isinstance(batch, MicroBatchRecord) and batch.tokens == 0
    pace.detach()


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
    model = TinyModel()
    wrapped = DistributedDataParallel(model)
    pace = attached(tmp_path / "ring", wrapped)
    held: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []
    original, in_time = pace.reporter.complete_pass, []

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

    def told() -> None:
        original()
        in_time.append(bool(held))
        release()

    monkeypatch.setattr(pace.reporter, "complete_pass", told)
    wrapped.register_comm_hook(None, hold)
    for step in range(3):
        with pace.step(step):
            wrapped(input_ids=IDS)["logits"].sum().backward()
    assert in_time == [True] * 3
    assert kinds(told_by(pace)) == ["MicroBatch", "ExpertLoad", "Step"] * 3
    pace.detach()
