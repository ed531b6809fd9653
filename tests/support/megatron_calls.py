"""The calls that Megatron-Core's schedules make, in their order, of a model with experts."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class Router(nn.Module):
    layer_number = 4

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.zeros(x.shape[0], 3, dtype=torch.bool)
        chosen[:, 1] = True
        return x, chosen


class Experts(nn.Module):
    def forward(self, x: Tensor, by_expert: Tensor) -> Tensor:
        return x


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        self.router(x)
        self.experts(x, torch.tensor([x.shape[0] - 2, 2]))
        return x


class Chunk(nn.Module):
    """A model, or a virtual stage of one."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.ones(()))
        self.moe = MoE()

    def forward(self, input_ids: Tensor, packed_seq_params: Any = None) -> Tensor:
        x = input_ids.reshape(-1, 1).to(torch.float32)
        loss: Tensor = (self.moe(x) * self.weight).sum()
        return loss


class Wrapper(nn.Module):
    """Data parallelism, which wraps the model once more."""

    def __init__(self, module: Chunk) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def forward_step(batches: Iterator[Tensor], model: Any) -> Tensor:
    loss: Tensor = model(next(batches))
    return loss


def run(
    chunks: list[Any],
    order: str,
    batches: Iterator[Tensor],
    *,
    step: Callable[..., Any] = forward_step,
    forward_only: bool = False,
) -> None:
    """A schedule as Megatron-Core's run them: F and B are passes, digits are chunks."""
    model: Any = chunks[0].module if isinstance(chunks[0], Wrapper) else chunks[0]
    config, losses = model.config, list[tuple[int, Tensor]]()
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=True)
    for kind, chunk in zip(order[::2], map(int, order[1::2]), strict=True):
        name = "forward-compute" if kind == "F" else "backward-compute"
        if config.timers is not None:
            config.timers(name, log_level=2).start()
        if kind == "F":
            losses.append((chunk, step(batches, chunks[chunk])))
        elif not forward_only:
            losses.pop(next(i for i, (of, _) in enumerate(losses) if of == chunk))[1].backward()
        if config.timers is not None:
            config.timers(name).stop()
    if config.timers is not None:
        config.timers("forward-backward").stop()
