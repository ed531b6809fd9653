"""The calls that torchtitan's trainer makes, in their order; names are those of 0.3."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class Experts(nn.Module):
    def forward(self, x: Tensor, by_expert: Tensor) -> Tensor:
        return x


class RoutedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner_experts = Experts()

    def forward(self, x: Tensor, scores: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
        result: Tensor = self.inner_experts(x, counts)
        return result


class MoE(nn.Module):
    """Of 0.3: the counts of its own tokens go to the experts as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.routed_experts = nn.Identity(), RoutedExperts()

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.tensor([x.shape[0] - 1, 1])
        result: Tensor = self.routed_experts(x, x, x, counts)
        return result


class Router(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, x, torch.tensor([x.shape[0] - 1, 1])


class OldMoE(nn.Module):
    """Of 0.2: the router says them."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        *_, counts = self.router(x)
        result: Tensor = self.experts(x, counts)
        return result


class Model(nn.Module):
    def __init__(self, moe: type[nn.Module]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.layers = nn.ModuleDict({"3": nn.ModuleDict({"moe": moe()})})

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens.reshape(-1, 1).to(torch.float32)
        (layer,) = self.layers.values()
        loss: Tensor = (layer["moe"](x) * self.weight).sum()  # type: ignore[index]
        return loss


class FlexAttention:
    class Config: ...


class Mesh:
    def get_local_rank(self) -> int:
        return 1


def dims(**more: int) -> SimpleNamespace:
    sizes = {"pp": 1, "tp": 1, "cp": 1, "ep": 1, "dp_replicate": 2, "dp_shard": 3, **more}
    return SimpleNamespace(get_mesh=lambda name: Mesh(), **sizes)


class Trainer:
    """The calls that Trainer.train makes, and their order."""

    def __init__(self, moe: type[nn.Module] = MoE, **more: Any) -> None:
        self.device = torch.device("cpu")
        self.parallel_dims = dims(**more)
        self.config: Any = SimpleNamespace(
            training=SimpleNamespace(disable_cuda_graphs=True),
            compile=SimpleNamespace(enable=False, components=["model", "loss"]),
        )
        self.model_config: Any = SimpleNamespace(
            first_attention=SimpleNamespace(inner_attention=FlexAttention.Config())
        )
        self.model_parts: list[Any] = [Model(moe)]
        self.metrics_processor: Any = SimpleNamespace()
        self.metrics_processor.log = lambda step, loss, worst: None
        self.step = 0
        self.accumulates = 2
        self.fails = False

    def forward_backward_step(self, *, input_dict: Any, labels: Any) -> None:
        if self.fails:
            raise ConnectionError("a rank is gone")
        for one in input_dict if isinstance(input_dict, list) else [input_dict]:
            self.model_parts[0](one["input"]).backward()

    def train_step(self, data_iterator: Iterator[Any]) -> str:
        batches = [next(data_iterator) for _ in range(self.accumulates)]
        if self.parallel_dims.pp > 1:
            inputs, labels = zip(*batches, strict=True)
            self.forward_backward_step(input_dict=list(inputs), labels=list(labels))
        else:
            for inputs, labels in batches:
                self.forward_backward_step(input_dict=inputs, labels=labels)
        if self.step % 2 == 0:
            self.metrics_processor.log(self.step, 2.5, 3.0)
        return "done"

    def train(self, batches: Iterator[Any], steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            try:
                self.train_step(batches)
            except StopIteration:
                self.step -= 1
                return

    def validate(self) -> None:
        for part in self.model_parts:
            part(torch.zeros(1, 99))


def batches_of(*shapes: tuple[int, int]) -> Iterator[Any]:
    return iter([({"input": torch.zeros(*shape)}, torch.zeros(*shape)) for shape in shapes])
