"""The calls that DeepSpeed's engines make, in their order, and the layers in them that we know."""

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class TopKGate(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.tensor([x.shape[0] - 1, 1])


class Experts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class MOELayer(nn.Module):
    """Two ranks, one expert each, a capacity as large as the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = TopKGate(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        self.gate(x)
        self.experts(x.expand(2, 1, *x.shape))
        return x


class Router(nn.Module):
    num_experts = 2

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        chosen = torch.zeros(len(x), 1, dtype=torch.int64)
        return x, chosen, torch.tensor([x.shape[0], 0], dtype=torch.int32)


class GroupedExperts(nn.Module):
    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return x


class AutoEPMoELayer(nn.Module):
    """As DeepSpeed's: its router counts, and its experts' rows are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(), GroupedExperts()
        self.tokens_per_expert: Tensor
        self.register_buffer("tokens_per_expert", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        counts = self.router(x)[2]
        self.tokens_per_expert.add_(counts)
        self.experts(torch.cat([x, x.new_zeros(8, 1)]), counts)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.moe: nn.Module = MOELayer()

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens.reshape(-1, 1).to(torch.float32)
        loss: Tensor = (self.moe(x) * self.weight).sum()
        return loss


class Engine:
    """The calls that DeepSpeedEngine makes, and their order."""

    def __init__(self, accumulates: int = 2) -> None:
        self.device = "cpu"
        self.module = Model()
        self.global_steps = self._micro_steps = 0
        self._accumulates = accumulates

    def __call__(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.module(tokens)
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self._backward_epilogue()

    def _backward_epilogue(self) -> None:
        pass

    def step(self) -> None:
        self._micro_steps += 1
        if self._micro_steps % self._accumulates == 0:
            self.global_steps += 1


class OlderEngine(Engine):
    """Before 0.18 an engine's backward was one method."""

    _backward_epilogue: Any = property()

    def backward(self, loss: Tensor) -> None:
        loss.backward()


class ForwardPass: ...


class BackwardPass: ...


class LoadMicroBatch: ...


class PipelineEngine(Engine):
    """Two stages; two micro-batches whose passes take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_stages, self.stage_id, self.mp_world_size = 2, 1, 4
        self.grid = SimpleNamespace(model_parallel_size=2)
        self.pipe_buffers: dict[str, list[Any]] = {"inputs": [None, None]}
        self.fails = False

    def _load(self, buffer_id: int) -> None:
        self.pipe_buffers["inputs"][buffer_id] = torch.zeros(1, 8 + buffer_id)

    def _pass(self, buffer_id: int) -> None:
        if self.fails:
            raise ConnectionError("a stage is gone")

    _INSTRUCTION_MAP: ClassVar = {LoadMicroBatch: _load, ForwardPass: _pass, BackwardPass: _pass}

    def train_batch(self) -> Tensor:
        for kind, buffer_id in (
            (LoadMicroBatch, 0), (ForwardPass, 0), (LoadMicroBatch, 1), (ForwardPass, 1),
            (BackwardPass, 0), (BackwardPass, 1),
        ):  # fmt: skip
            self._INSTRUCTION_MAP[kind](self, buffer_id=buffer_id)
        self.global_steps += 1
        return torch.tensor(2.5)

    def eval_batch(self) -> None:
        for kind in (LoadMicroBatch, ForwardPass):
            self._INSTRUCTION_MAP[kind](self, buffer_id=0)
