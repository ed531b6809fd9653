"""The Python of pages about training runs as it stands, on what the text around it speaks of."""

import re
import runpy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import pacekeeper
from pacekeeper.core.telemetry.records import MicroBatchRecord, StepRecord
from pacekeeper.core.telemetry.shm_ring import ring_file_name
from pacekeeper.trainer.adapters.batch_shares import BatchShares, ShareSchedule, step_loader
from support.rings import records_in
from support.tree import ROOT

JOB, STEPS = "page", 3


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


def recorded(kind: type) -> list[Any]:
    (ring,) = (Path("rings") / JOB).glob(ring_file_name(0))
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


def test_batch_shares_of_a_plain_loop() -> None:
    model = DistributedDataParallel(nn.Linear(4, 1))
    found = run(
        blocks("docs/plan-consumer.md")[0],
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        rank=0,
        world_size=1,
        dataset=TensorDataset(torch.ones(STEPS * 32 * 8, 4)),
        loss_of=lambda model, batch: model(batch[0]).square().mean(),
        pacekeeper=pacekeeper,
        ShareSchedule=ShareSchedule,
        BatchShares=partial(BatchShares, tokens_of=lambda batch: len(batch[0])),
        step_loader=step_loader,
    )
    assert found["schedule"].at(found["shares"].step) == (32,)
    assert len(recorded(MicroBatchRecord)) == STEPS * 32


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
