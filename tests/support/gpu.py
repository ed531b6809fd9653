"""The device of tests/gpu: a GPU, or what PACEKEEPER_TEST_DEVICE names, to rehearse them on a CPU.

What holds on a CUDA device only is skipped there in any case (`needs_cuda`).
"""

import os

import pytest
import torch

DEVICE = torch.device(os.environ.get("PACEKEEPER_TEST_DEVICE", "cuda:0"))
_HAS_CUDA = torch.cuda.is_available()

needs_device = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type == "cuda" and not _HAS_CUDA, reason="needs a CUDA device"),
]
needs_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _HAS_CUDA, reason="needs a CUDA device"),
]
