"""The engine on a real CUDA device: losses as on the CPU, moves, reports, few host waits.

Skips itself where there is no device. Ranks are threads, or one process with one NCCL rank: NCCL
gives a device to one rank only.
"""

import time
import warnings
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from benchmarks.gpu.common import TINY, micro_batch
from benchmarks.gpu.models import one_rank
from benchmarks.gpu.training import move_between_slots

from pacekeeper.agent.rings.collector import RingCollector
from pacekeeper.core.telemetry.records import ExpertLoadRecord, MicroBatchRecord
from pacekeeper.trainer.adapters import reporter
from pacekeeper.trainer.engine.engine import Engine
from pacekeeper.trainer.model import library
from support.engine_saves import layout_of
from support.engines import adamw, engine_of, held_tensors, micro_batches, random_layout, rows_of
from support.gpu import DEVICE, needs_cuda, needs_device
from support.rank_threads import ThreadGroup, run_ranks

pytestmark = needs_device
STEPS, LAYERS = 6, 2


def losses(device: str, compute_dtype: torch.dtype | None = None, size: int = 7) -> list[float]:
    engine = engine_of(
        "qwen3_moe",
        dtype=torch.float32,
        device=device,
        compute_dtype=compute_dtype,
        max_grad_norm=1.0,
        checkpoint_activations=True,
    )
    adamw(engine)
    return [engine.step(micro_batches(rows_of(s), size)).loss.item() for s in range(STEPS)]


def test_losses_in_float32_are_those_of_the_cpu() -> None:
    assert losses(str(DEVICE)) == pytest.approx(losses("cpu"), rel=1e-4)


def test_losses_in_mixed_precision_are_near_those_of_the_cpu() -> None:
    assert losses(str(DEVICE), torch.bfloat16) == pytest.approx(losses("cpu"), rel=0.02)


def test_state_moves_between_slots_of_the_device_bit_by_bit() -> None:
    assert move_between_slots(DEVICE, TINY).is_bit_equal


def test_one_rank_of_the_backend_trains_as_none_does() -> None:
    def train(engine: Engine) -> list[float]:
        adamw(engine)
        return [engine.step([micro_batch(TINY.small, s)]).loss.item() for s in range(3)]

    options: dict[str, Any] = {"dtype": torch.float32, "device": DEVICE, "max_grad_norm": 1.0}
    with one_rank(DEVICE) as groups:
        engine = Engine.from_config(TINY.small.config, groups=groups, **options)
        found = train(engine)
    assert found == pytest.approx(train(Engine.from_config(TINY.small.config, **options)), rel=1e-4)


def test_ranks_that_are_threads_dispatch_and_move_on_the_device() -> None:
    """Forward passes only: backward passes of one device share a thread, and would wait."""

    def work(group: ThreadGroup) -> tuple[list[float], dict[tuple[str, int | None], Tensor]]:
        layout = layout_of((0, 1), replicas=1)
        engine = engine_of(
            "qwen3_moe", group, dtype=torch.float32, layout=layout, device=DEVICE, num_slots=4
        )
        batches = micro_batches(rows_of(0)[3 * group.rank : 3 + 4 * group.rank])
        found = [engine.evaluate(batches).item()]
        engine.apply(random_layout(layout, Random(1)))
        found.append(engine.evaluate(batches).item())
        return found, {(n, e): t.cpu() for n, e, t in held_tensors(engine)}

    alone = engine_of("qwen3_moe", dtype=torch.float32, device=DEVICE)
    wanted = {(n, e): t.cpu() for n, e, t in held_tensors(alone)}
    loss = alone.evaluate(micro_batches(rows_of(0))).item()
    for found, held in run_ranks(2, work):
        assert found == pytest.approx([loss, loss], rel=1e-4)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in held.items())


def test_what_the_engine_reports_is_that_of_the_cpu(tmp_path: Path) -> None:
    def reported(device: torch.device, folder: Path) -> list[tuple[object, ...]]:
        engine = engine_of("qwen3_moe", dtype=torch.float32, device=device)
        adamw(engine)
        hooks = reporter.attach(
            job="gpu", device=device, rank=0, world_size=1, ring_dir=str(folder)
        )
        engine.watch(hooks)
        for step in range(STEPS):
            engine.step(micro_batches(rows_of(step)))
        if device.type == "cuda":
            torch.cuda.synchronize()
        engine.step(micro_batches(rows_of(STEPS)))
        hooks.detach()
        (reading,) = RingCollector(directory=folder).poll(time.monotonic())
        timed = [r for r in reading.records if isinstance(r, MicroBatchRecord)]
        assert all(record.compute_s > 0.0 for record in timed)
        loads = [r for r in reading.records if isinstance(r, ExpertLoadRecord)]
        return [
            *((r.step, r.micro_batch, r.tokens, r.expert_rows) for r in timed if r.step < STEPS),
            *((r.step, r.layer, sum(r.counts)) for r in loads if r.step < STEPS),
        ]

    found = reported(DEVICE, tmp_path / "device")
    assert found == reported(torch.device("cpu"), tmp_path / "cpu")
    assert len(found) == STEPS * (3 + LAYERS)


@pytest.mark.parametrize("counts", [[5, 0, 0, 3], [0, 0, 0, 0]])
def test_experts_without_rows_have_gradients_of_zero(counts: list[int]) -> None:
    engine = engine_of("qwen3_moe", dtype=torch.bfloat16, device=DEVICE)
    one = engine.skeleton.experts[0]
    assert one is not None
    module = one.module
    stale = [torch.full_like(p, float("nan")) for p in module.parameters()]
    del stale  # so that memory which is not written to shows
    rows = torch.randn(sum(counts), 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    out = library.run_grouped_experts(module, rows, torch.tensor(counts, device=DEVICE))
    out.backward(torch.ones_like(out))
    assert rows.grad is not None and bool(rows.grad.isfinite().all())
    for parameter in module.parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all())
        for expert, count in enumerate(counts):
            assert bool(parameter.grad[expert].any()) == (count > 0)


@needs_cuda[1]
def test_a_layer_waits_for_the_device_once_per_micro_batch() -> None:
    engine: Engine = engine_of(
        "qwen3_moe", dtype=torch.float32, device="cuda", compute_dtype=torch.bfloat16
    )
    adamw(engine)
    batches = micro_batches(rows_of(0), 3)
    engine.step(batches)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.step(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in caught if "synchroniz" in str(w.message)]
    # Copies of each micro-batch's pageable tensors to the device wait as well.
    assert len(waits) <= len(batches) * (LAYERS + 2)
