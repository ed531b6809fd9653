"""Weights cast once for several passes: values, gradients, and when copies are made."""

import torch
from torch import Tensor, nn

from pacekeeper.trainer.parallel.weight_casts import WeightCasts


def test_one_copy_serves_all_passes_until_it_is_forgotten() -> None:
    weight, casts = nn.Parameter(torch.randn(3, 4)), WeightCasts()
    first, second = casts(weight, torch.bfloat16), casts(weight, torch.bfloat16)
    assert first.data_ptr() == second.data_ptr()
    with torch.no_grad():
        weight.mul_(2.0)
    casts.forget()
    assert torch.equal(casts(weight, torch.bfloat16), weight.to(torch.bfloat16))
    assert casts(weight, torch.float32) is weight


def test_gradients_are_those_of_a_cast_in_every_pass() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(5, 4, generator=generator))
    rows = torch.randn(2, 3, 4, generator=generator).bfloat16()

    def gradient(cast: object) -> Tensor:
        weight.grad = None
        for part in rows:
            (part @ cast(weight, torch.bfloat16).T).square().sum().backward()  # type: ignore[operator]
        assert weight.grad is not None and weight.grad.dtype == torch.float32
        return weight.grad

    assert torch.equal(gradient(WeightCasts()), gradient(Tensor.to))
