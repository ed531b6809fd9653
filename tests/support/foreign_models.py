"""Small torch models as other trainers have them, and what is told of them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pacekeeper.core.telemetry.records import Record
from pacekeeper.trainer.adapters.pytorch import TorchHooks, attach
from support.rings import records_in


class TinyRouter(torch.nn.Module):
    """Scores and choices, as routers of published models return them."""

    def __init__(self, hidden_size: int, num_experts: int, choices: int) -> None:
        super().__init__()
        self.num_experts, self.choices = num_experts, choices
        self.weight = torch.nn.Parameter(torch.randn(num_experts, hidden_size))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores, chosen = torch.topk(hidden @ self.weight.T, self.choices)
        return scores.softmax(-1), chosen


class TinyModel(torch.nn.Module):
    """Embeds, routes, answers; `is_frozen`: nothing of it learns."""

    def __init__(
        self,
        *,
        num_experts: int = 4,
        choices: int = 2,
        vocabulary: int = 16,
        is_frozen: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(vocabulary, 8)
        self.router = TinyRouter(8, num_experts, choices)
        self.head = torch.nn.Linear(8, 8)
        self.recomputes = False
        if is_frozen:
            self.requires_grad_(False)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(input_ids)
        if self.recomputes:
            hidden = torch.utils.checkpoint.checkpoint(self._routed, hidden, use_reentrant=False)
        else:
            hidden = self._routed(hidden)
        return {"logits": self.head(hidden)}

    def _routed(self, hidden: Tensor) -> Tensor:
        weights, _ = self.router(hidden.reshape(-1, hidden.shape[-1]))
        scaled: Tensor = hidden * weights.sum(-1).reshape(*hidden.shape[:-1], 1)
        return scaled


def attached(directory: Path, model: Any = None, optimizer: Any = None, **more: Any) -> TorchHooks:
    """Hooks of this process on the host's clock, in a ring of `directory`."""
    options = {"job": "j", "device": "cpu", "ring_dir": str(directory), **more}
    return attach(model, optimizer, **options)


def told_by(pace: TorchHooks) -> list[Record]:
    assert pace.ring.num_errors == 0, pace.ring.reason
    assert pace.ring.path is not None
    return records_in(pace.ring.path)
