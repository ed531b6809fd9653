"""The Python of pages about training runs, on what the text around it speaks of.

What a page takes for granted (models, data, the trainer's classes) is given by the test, and where
it says "train as before" or `...`, the test trains. Two more things differ: the pages of the engine
and of its data run with small numbers, and with one step for each batch of the loader. DeepSpeed,
Megatron and torchtitan are stand-ins that make their calls in their order; Hugging Face's and
Lightning's trainers are real.
"""

import inspect
import re
import runpy
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.records import MicroBatchRecord, StepRecord
from pacekeeper.core.telemetry.shm_ring import ring_file_name
from pacekeeper.trainer.adapters import torchtitan
from pacekeeper.trainer.plans.consumer import PlanConsumer
from support import deepspeed_calls, megatron_calls, torchtitan_calls
from support.rings import records_in
from support.tree import ROOT

JOB, STEPS = "page", 3
MY_RUN = "my-run"  # the job of pages that name one
TRAINED = "...  # train as before"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A job of one rank, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACEKEEPER_RING_DIR", str(tmp_path / "rings"))
    monkeypatch.setenv("PACEKEEPER_JOB", JOB)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run(code: str, **names: Any) -> dict[str, Any]:
    """Execute the code with these names; end its attachment."""
    Path("page.py").write_text(code)
    found = runpy.run_path("page.py", init_globals=names)
    if "pace" in found:
        assert found["pace"].ring.num_errors == 0
        found["pace"].detach()
    return found


def recorded(kind: type, job: str = JOB) -> list[Any]:
    (ring,) = (Path("rings") / job).glob(ring_file_name(0))
    return [record for record in records_in(ring) if isinstance(record, kind)]


def trained() -> dict[str, Any]:
    model = nn.Linear(4, 1)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01)}


def test_the_readme_attaches_a_loop() -> None:
    run(blocks("README.md")[0], batches=[torch.ones(2, 4)] * STEPS, **trained())
    assert [record.step for record in recorded(StepRecord)] == [*range(STEPS)]


def test_what_the_blocks_of_the_page_of_torch_tell_is_reported() -> None:
    attached, told = blocks("docs/trainer-torch.md")

    def loss_of(output: Tensor, _: Tensor) -> Tensor:
        return output.square().mean()

    code = attached + f"for step in range({STEPS}):\n" + re.sub("(?m)^", "    ", told)
    run(code, batch=torch.ones(2, 4), n=70, s=2450, loss_of=loss_of, **trained())
    work = recorded(MicroBatchRecord)
    assert [(one.step, one.tokens, one.sum_len_squared) for one in work] == [
        (step, 70, 2450) for step in range(STEPS)
    ]
    losses = [record.loss for record in recorded(StepRecord)]
    assert losses[0] > losses[-1] > 0.0


def token_rows(number: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.ones(4, dtype=torch.int64)} for _ in range(number)]


def mean_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(batch["input_ids"].float()).square().mean()
    return loss


def test_batch_shares_of_a_plain_loop() -> None:
    model = DistributedDataParallel(nn.Linear(4, 1))
    found = run(
        blocks("docs/plan-consumer.md")[0],
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        rank=0,
        world_size=1,
        dataset=token_rows(STEPS * 32 * 8),
        loss_of=mean_of,
    )
    assert found["schedule"].at(found["shares"].step) == (32,)
    assert len(recorded(MicroBatchRecord)) == STEPS * 32


def test_batch_shares_of_huggingface() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    from support.share_trainer_runs import mixtral

    rows = [row | {"labels": row["input_ids"]} for row in token_rows(STEPS * 32 * 2)]

    class Given(Trainer):  # type: ignore[misc]
        def __init__(self, _: Any, callbacks: list[Any]) -> None:
            arguments = TrainingArguments(
                "out", report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
                per_device_train_batch_size=2, max_steps=STEPS, ddp_backend="gloo",
            )  # fmt: skip
            super().__init__(mixtral(), arguments, train_dataset=rows, callbacks=callbacks)

    run(blocks("docs/plan-consumer.md")[1] + "trainer.train()\n", Trainer=Given)
    assert steps_of_my_run() == [*range(STEPS)]
    assert len(recorded(MicroBatchRecord, MY_RUN)) == STEPS * 32


def test_batch_shares_of_lightning() -> None:
    lightning: Any = pytest.importorskip("lightning.pytorch")
    from support.lightning_runs import trainer

    class Given(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
            return mean_of(self.layer, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    page = (ROOT / "docs/plan-consumer.md").read_text()
    callback = 'Pacekeeper(job="my-run", micro_batches_per_step=32)'
    option = "use_distributed_sampler"
    assert page.count(callback) == 2 and f"`Trainer({option}=False)`" in page
    code = blocks("docs/plan-consumer.md")[2] + f"fit(MyModule(), {callback})\n"

    def fit(module: Any, watch: Any) -> None:
        options = {option: False, "strategy": "ddp", "devices": 1, "max_steps": STEPS}
        trainer(lightning, Path("out"), watch, **options).fit(module)

    run(code, LightningModule=Given, dataset=token_rows(STEPS * 32 * 8), fit=fit)
    assert steps_of_my_run() == [*range(STEPS)]
    work = recorded(MicroBatchRecord, MY_RUN)  # Lightning's batch, a whole step, is one
    assert [one.tokens for one in work] == [32 * 8 * 4] * STEPS


def test_the_protocol_of_consumers_is_that_of_the_code() -> None:
    """examples/plan_consumer.py, which follows it, has tests of its own."""
    found = run(blocks("docs/plan-consumer.md")[3], Protocol=Protocol, Layout=Layout)
    (page,) = [value for name, value in found.items() if name == "PlanConsumer"]
    methods = {name for name in vars(PlanConsumer) if not name.startswith("_")}
    assert methods == {name for name in vars(page) if not name.startswith("_")}
    for name in methods:
        ours, theirs = (inspect.signature(getattr(one, name)) for one in (PlanConsumer, page))
        assert ours == theirs, name


def test_the_engine_as_a_library_on_token_files() -> None:
    pytest.importorskip("transformers")
    from pacekeeper.trainer.data.sampler import Sampler
    from pacekeeper.trainer.data.token_stream import open_tokens
    from support.engine_jobs import VOCABULARY, write_data, write_model

    write_model(Path("model"))
    write_data(Path("train.bin"), 20_000)
    code = blocks("docs/engine.md")[0].replace("result = ", "# ")
    code += re.sub("256|4096", "8", blocks("docs/data.md")[0])
    numbers = {"first_step": 0, "last_step": STEPS, "model_vocab_size": VOCABULARY}
    names = {"torch": torch, "Sampler": Sampler, "open_tokens": open_tokens}
    found = run(code, device=torch.device("cpu"), **numbers, **names)
    assert found["engine"].num_steps == STEPS


def steps_of_my_run() -> list[int]:
    return [record.step for record in recorded(StepRecord, MY_RUN)]


def test_the_callback_of_huggingface_trains() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from support.huggingface_runs import Paced, trainer

    def made(*_: Any, callbacks: list[Any]) -> Any:
        return trainer(Paced(None), Path("out"), callbacks[0], max_steps=STEPS)

    (code,) = blocks("docs/trainer-huggingface.md")
    run(code + "trainer.train()\n", Trainer=made)
    assert len(steps_of_my_run()) == STEPS


def test_the_callback_of_lightning_trains() -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from support.lightning_runs import automatic, loader, trainer

    def made(*_: Any, callbacks: list[Any]) -> Any:
        return trainer(lightning, Path("out"), callbacks[0], max_steps=STEPS)

    (code,) = blocks("docs/trainer-lightning.md")
    fit = "trainer.fit(module, loader)\n"
    run(code + fit, Trainer=made, module=automatic(lightning.LightningModule), loader=loader())
    assert len(steps_of_my_run()) == STEPS


def test_an_engine_of_deepspeed_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = ModuleType("deepspeed")
    package.initialize = lambda *_: (deepspeed_calls.Engine(accumulates=1), None, None, None)
    monkeypatch.setitem(sys.modules, "deepspeed", package)
    (code,) = blocks("docs/trainer-deepspeed.md")
    assert code.count(TRAINED) == 1
    run(code.replace(TRAINED, "train(engine)"), train=engine_steps)
    assert steps_of_my_run() == [*range(STEPS)]


def engine_steps(engine: Any) -> None:
    for _ in range(STEPS):
        engine.backward(engine(torch.zeros(1, 4)))
        engine.step()


def megatron_chunk() -> megatron_calls.Chunk:
    config = SimpleNamespace(timers=None, virtual_pipeline_model_parallel_size=None)
    return megatron_calls.Chunk(config)


def megatron_ways() -> tuple[str, str, str]:
    """The page's import, its line for Megatron-LM, and what it says for one's own loop."""
    (code,) = blocks("docs/trainer-megatron.md")
    found = re.fullmatch(r"(.*)# Megatron-LM.*?\n(.*)# Megatron-Core.*?\n(.*)", code, re.DOTALL)
    assert found is not None
    return found[1], found[2], found[3]


def test_pretrain_of_megatron_is_watched() -> None:
    chunks: list[Any] = [megatron_chunk()]

    def pretrain(*given: Any) -> None:
        for _ in range(STEPS):
            batches = iter([torch.zeros(1, 4)])
            megatron_calls.run(chunks, "F0B0", batches, step=given[-1])

    begin, line, _ = megatron_ways()
    run(begin + line, pretrain=pretrain, forward_step=megatron_calls.forward_step)
    assert len(steps_of_my_run()) == STEPS - 1, "the page says that the first is not reported"


def test_an_own_loop_of_megatron_core_is_watched() -> None:
    chunks: list[Any] = [megatron_chunk()]
    optimizer = SimpleNamespace()
    optimizer.step = lambda: None

    def train() -> None:
        for _ in range(STEPS):
            megatron_calls.run(chunks, "F0B0", iter([torch.zeros(1, 4)]))
            optimizer.step()

    begin, _, own_loop = megatron_ways()
    trained = "...  # forward_backward_func(...), optimizer.step()"
    assert own_loop.count(trained) == 1
    code = begin + own_loop.replace(trained, "train()")
    run(code, chunks=chunks, optimizer=optimizer, train=train)
    assert steps_of_my_run() == [*range(STEPS)]


def test_a_trainer_of_torchtitan_is_watched() -> None:
    trainer: Any = torchtitan_calls.Trainer()
    batches = torchtitan_calls.batches_of(*[(1, 4)] * (2 * STEPS))
    trainer.train = partial(trainer.train, batches, STEPS)
    code = blocks("docs/trainer-torchtitan.md")[0]
    run(code, config=SimpleNamespace(build=lambda: trainer))
    assert steps_of_my_run() == [1, 2, 3]


def test_plans_for_torchtitan_are_opted_into_by_settings_that_there_are() -> None:
    """Runs of them: tests/integration/trainer/test_torchtitan_experts.py."""
    opted: set[str] = set()

    def watch(*args: Any, **settings: Any) -> None:
        inspect.signature(torchtitan.watch).bind(*args, **settings)
        opted.update(name for name, value in settings.items() if value is True)

    for code in blocks("docs/trainer-torchtitan.md")[1:]:
        run(code, torchtitan=SimpleNamespace(watch=watch), trainer=None)
    assert opted == {"moves_experts", "shares_batches"}
