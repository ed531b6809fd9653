"""The routers of a model, and how their outputs give the logits of experts.

A load-balancing loss of our own takes them by forward hooks; the library's `output_router_logits`
is not needed.
"""

from dataclasses import dataclass
from typing import Any

import torch

from pacekeeper.trainer.model import library
from pacekeeper.trainer.model.families import family_of
from pacekeeper.trainer.model.skeleton import Skeleton


@dataclass(frozen=True, eq=False)
class Router:
    """The router of one decoder layer.

    Attributes:
        layer: the decoder layer.
        name: the module's name in the model.
        module: the module, for a forward hook.
        scores: whether it returns scores in [0, 1] (of a sigmoid) instead of logits.
    """

    layer: int
    name: str
    module: torch.nn.Module
    scores: bool
    _index: int

    def logits(self, output: Any) -> torch.Tensor:
        """The logits (scores, where `scores`) of all experts, [tokens, E], from a hook's output."""
        found: torch.Tensor = output[self._index] if isinstance(output, tuple) else output
        return found.reshape(-1, found.shape[-1])


def routers(skeleton: Skeleton) -> tuple[Router | None, ...]:
    """The router of each decoder layer; None for a layer without experts.

    Also None where the library records no logits of a layer's router; docs/models.md lists these
    families.
    """
    classes = library.router_classes(skeleton.module)
    scores = family_of(skeleton.config.model_type).scores
    found: list[Router | None] = [None] * skeleton.num_layers
    for name, module in skeleton.module.named_modules():
        index = classes.get(type(module))
        number = name.removeprefix(f"{skeleton.layers}.").partition(".")[0]
        if index is not None and name.startswith(f"{skeleton.layers}."):
            layer = int(number)
            if skeleton.experts[layer] is not None and found[layer] is None:
                found[layer] = Router(layer, name, module, scores, index)
    return tuple(found)
