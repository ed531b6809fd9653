"""Checkpoints of the engine on a real CUDA device: copied beside the step, and restored to it.

Skips itself where there is no device.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from support.engine_saves import assert_all_same, layout_of, trained
from support.gpu import needs_cuda

pytestmark = needs_cuda


def fused(engine: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(engine.parameters(), lr=1e-2, fused=True)]


def test_what_was_saved_from_a_device_is_there_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "device": "cuda",
        "dtype": torch.float32,
        "compute_dtype": torch.bfloat16,
        "optimizers": fused,
    }
    _, saved = trained(layout_of([0]), 3, directory=tmp_path, **options)
    began, found = trained(layout_of([0]), 3, directory=tmp_path, run_id=2, **options)
    assert began == 3
    assert {t.device.type for tensors in found.values() for t in tensors.values()} == {"cuda"}
    assert_all_same(found, saved)
