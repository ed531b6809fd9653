"""Optimizer state of single experts, and the test that an optimizer has such a thing.

The experts of a layer lie stacked in one parameter. An optimizer that treats every element alone
(AdamW, SGD, ...) then does for each slot what it would do for a parameter of its own; one that
looks at a whole tensor (Adafactor's factored moments, Muon's orthogonalised update) does not, and
an expert that moved would train differently.
"""

import inspect
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from pacekeeper.core.errors import ConfigError

_STEPS = 3
_TOLERANCE = 1e-12  # kernels for one and for many tensors may round differently


def states_of(
    parameter: nn.Parameter, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Tensor]:
    """Return the optimizer's tensors with one value per element of the parameter, by name."""
    return {
        key: value
        for optimizer in optimizers
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor) and value.shape == parameter.shape
    }


def require_per_element(
    optimizers: Iterable[torch.optim.Optimizer], experts: Iterable[nn.Parameter]
) -> None:
    """Reject an optimizer of experts that does not act on each element alone.

    Each optimizer of expert parameters makes a few steps on two small matrices, stacked and
    separately, with the settings of each group of experts but for the learning rate.

    Raises:
        ConfigError: The results differ, or the optimizer cannot be tried.
    """
    ids = {id(parameter) for parameter in experts}
    for optimizer in optimizers:
        groups = [g for g in optimizer.param_groups if any(id(p) in ids for p in g["params"])]
        reasons = (_difference(type(optimizer), group) for group in groups)
        if reason := next(filter(None, reasons), ""):
            raise ConfigError(
                f"{type(optimizer).__name__} cannot update experts: {reason}",
                remedy="use AdamW, Adam or SGD for Engine.expert_parameters(), and the other "
                "optimizer for Engine.dense_parameters() only",
            )


def _difference(kind: type[torch.optim.Optimizer], group: dict[str, object]) -> str:
    """Return why a stacked parameter is not updated like separate ones; "" if it is."""
    accepted = inspect.signature(kind).parameters
    settings = {k: v for k, v in group.items() if k in accepted and k != "params"}
    # A warm-up begins with a rate at which nothing shows; graphs need a device.
    settings |= {k: v for k, v in {"lr": 1e-2, "capturable": False}.items() if k in settings}
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)
    gradients = torch.randn(_STEPS, 2, 4, 6, generator=generator, dtype=torch.float64)
    try:
        stacked = [nn.Parameter(values.clone())]
        separate = [nn.Parameter(value.clone()) for value in values]
        # Of each slot another size, so that what is shared over a tensor shows.
        scale = torch.tensor([1.0, 10.0], dtype=torch.float64)[:, None, None]
        together, alone = kind(stacked, **settings), kind(separate, **settings)  # type: ignore[arg-type]
        for gradient in gradients * scale:
            stacked[0].grad = gradient.clone()
            for parameter, own in zip(separate, gradient, strict=True):
                parameter.grad = own.clone()
            together.step()
            alone.step()
    except Exception as error:  # of any library
        return f"it could not be tried on a stack of two matrices ({error})"
    for one in together.state.values():
        for key, value in one.items():
            if isinstance(value, Tensor) and value.numel() > 1 and value.shape != values.shape:
                return f"its state {key!r} is not one value per element"
    apart = torch.stack([parameter.detach() for parameter in separate])
    if not torch.allclose(stacked[0].detach(), apart, rtol=_TOLERANCE, atol=_TOLERANCE):
        return "its update of an element depends on the other elements of the tensor"
    return ""
