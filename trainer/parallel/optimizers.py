"""State that optimizers keep: of single experts, of parameters that were never updated.

The experts of a layer lie stacked in one parameter. An optimizer that treats every element alone
(AdamW, SGD, ...) then does for each slot what it would do for a parameter of its own; one that
looks at a whole tensor (Adafactor's factored moments, Muon's orthogonalised update) does not, and
an expert that moved would train differently.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pacekeeper.core.errors import ConfigError

_PRIMES = (2, 3, 5, 7, 11, 13)
_STEPS = 3
_REMEDY = "use an optimizer of torch.optim that needs no closure, or save no checkpoints"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NewState:
    """What an optimizer keeps of a parameter.

    Attributes:
        zeros: By name, zeros with the shape, type and device of the state; they take no memory.
        is_made_at_once: Whether it is there before the first step (Adagrad).
    """

    zeros: Mapping[str, Tensor]
    is_made_at_once: bool


def new_state(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, object],
    parameter: nn.Parameter,
    device: torch.device,
) -> "NewState":
    """Return what an optimizer keeps of a parameter after its first step.

    One step is tried on a small parameter, each of whose sizes is another prime number.

    Args:
        optimizer: It stays as it is.
        group: Its group of the parameter.
        parameter: Updated or not; it may be on the meta device.
        device: Where the state is.

    Raises:
        ConfigError: The optimizer can not be tried, or keeps something else than tensors.
    """
    kind = type(optimizer)
    sizes = _PRIMES[: parameter.ndim]
    small = nn.Parameter(parameter.detach().new_zeros(sizes, device=device))
    small.grad = torch.zeros_like(small)
    try:
        trial = kind([small], **_settings(kind, group))  # type: ignore[arg-type]
        is_made_at_once = bool(trial.state)
        trial.step()
    except Exception as error:  # of any library
        raise ConfigError(
            f"{kind.__name__} could not be tried, so what it keeps is not known: {error}",
            remedy=_REMEDY,
        ) from error
    size_of = dict(zip(sizes, parameter.shape, strict=True))
    found = {}
    for key, value in sorted(trial.state[small].items()):
        if isinstance(value, Tensor):
            shape = [size_of.get(size, size) for size in value.shape]
            found[key] = value.new_zeros(()).expand(shape)
        elif value is not None:
            raise ConfigError(f"{kind.__name__} keeps {key!r}, which is no tensor", remedy=_REMEDY)
    return NewState(zeros=found, is_made_at_once=is_made_at_once)


def require_per_element(
    optimizers: Iterable[torch.optim.Optimizer], parts: Iterable[nn.Parameter]
) -> None:
    """Reject an optimizer of experts or shards that does not act on each element alone.

    Each optimizer of such parameters makes a few steps on two small matrices, stacked and
    separately, with the settings of each of their groups but for the learning rate.

    Raises:
        ConfigError: The results differ, or the optimizer cannot be tried.
    """
    ids = {id(parameter) for parameter in parts}
    for optimizer in optimizers:
        groups = [g for g in optimizer.param_groups if any(id(p) in ids for p in g["params"])]
        reasons = (_difference(type(optimizer), group) for group in groups)
        if reason := next(filter(None, reasons), ""):
            raise ConfigError(
                f"{type(optimizer).__name__} cannot update experts, nor tensors that are divided "
                f"into shards: {reason}",
                remedy="use AdamW, Adam or SGD for Engine.expert_parameters(), and the other "
                "optimizer for Engine.dense_parameters() of a model without shards only",
            )


def _settings(kind: type[torch.optim.Optimizer], group: Mapping[str, object]) -> dict[str, object]:
    """Return what an optimizer of this kind is made with to treat parameters as the group."""
    accepted = inspect.signature(kind).parameters
    return {k: v for k, v in group.items() if k in accepted and k != "params"}


def _difference(kind: type[torch.optim.Optimizer], group: dict[str, object]) -> str:
    """Return why a stacked parameter is not updated like separate ones; "" if it is."""
    settings = _settings(kind, group)
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
