"""The engine on a real CUDA device: losses as on the CPU, mixed precision, few host waits.

Skips itself where there is no device. One process: NCCL gives a device to one rank only.
"""

import warnings

import pytest
import torch

pytest.importorskip("transformers")

from pacekeeper.trainer.engine.engine import Engine
from support.engines import adamw, engine_of, micro_batches, rows_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
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
    assert losses("cuda") == pytest.approx(losses("cpu"), rel=1e-4)


def test_losses_in_mixed_precision_are_near_those_of_the_cpu() -> None:
    assert losses("cuda", torch.bfloat16) == pytest.approx(losses("cpu"), rel=0.02)


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
