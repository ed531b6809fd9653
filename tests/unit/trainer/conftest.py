"""What tests of several parts of the trainer need."""

from typing import Any

import pytest


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """What insists on float32 in transformers - norms, softmax, routers - gets float64."""
    import torch

    wide_float: Any = torch.float64
    monkeypatch.setattr(torch, "float32", wide_float)
    monkeypatch.setattr(torch, "float", wide_float)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
