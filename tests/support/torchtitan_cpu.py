"""Lets torchtitan's own Trainer run on CPUs and gloo; import it before torchtitan.

torchtitan asks torch for its accelerator and has no run without one. Here the CPU is named as the
accelerator, and `torch.cpu` gets the few functions that only report memory. Of torchtitan itself
only the change of time limits is left out.
"""

import importlib
import sys
import types
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def use_cpu() -> None:
    """Name the CPU as torch's accelerator, and do without TensorBoard where it cannot be loaded."""
    torch._utils._get_available_device_type = lambda: "cpu"
    memory = SimpleNamespace(total_memory=1 << 34)
    functions: dict[str, Any] = {
        "get_device_name": "cpu",
        "get_device_properties": memory,
        "memory_stats": {},
        "reset_peak_memory_stats": None,
        "empty_cache": None,
    }
    for name, value in functions.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, _returning(value))
    try:
        importlib.import_module("torch.utils.tensorboard")
    except Exception:
        stub: Any = types.ModuleType("torch.utils.tensorboard")
        stub.SummaryWriter = object
        sys.modules["torch.utils.tensorboard"] = stub


def fit_to_gloo(model_parts: Iterable[nn.Module]) -> None:
    """Leave out what torch 2.13 and gloo cannot do: a factor 1 within FSDP2's sums of gradients,
    and the shorter time limits that torchtitan sets after the first step.
    """
    from torchtitan.distributed import utils

    utils.set_pg_timeouts = _returning(None)
    for part in model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def use_float64() -> None:
    """Let torchtitan compute everything in float64, where it names float32 or bfloat16."""
    from torchtitan.config import TORCH_DTYPE_MAP

    torch.storage._dtype_to_storage_type_map()  # tables of types, made once
    torch.storage._storage_type_to_dtype_map()
    for name in ("float32", "bfloat16"):
        TORCH_DTYPE_MAP[name] = torch.float64
        setattr(torch, name, torch.float64)
    for name in ("float", "bfloat16"):
        setattr(Tensor, name, Tensor.double)
    setattr(torch, "_grouped_mm", _grouped_mm)  # noqa: B010


def _grouped_mm(rows: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
    """torch's own has no float64."""
    ends = offs.tolist()
    parts = zip([0, *ends], ends, weights, strict=False)
    return torch.cat([rows[begin:end] @ weight for begin, end, weight in parts])


def _returning(value: Any) -> Any:
    return lambda *args, **named: value
