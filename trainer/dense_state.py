"""What every rank holds of the model - dense weights, both moments, the number of updates - as one
vector, and back: a rank that joins gets it from the members, each of which sends an equal part.
"""

import torch
from torch import Tensor

from pacekeeper.trainer.model import MoETransformer

_MOMENTS = ("exp_avg", "exp_avg_sq")


def num_values(model: MoETransformer) -> int:
    """The length of the vector, the same on all ranks."""
    return 1 + 3 * sum(p.numel() for p in model.dense_parameters())


def part_of(num: int, index: int, parts: int) -> slice:
    """Part `index` of `parts` equal ones (give or take one) of a vector of `num` values."""
    return slice(num * index // parts, num * (index + 1) // parts)


def pack(model: MoETransformer, optimizer: torch.optim.Optimizer) -> Tensor:
    """[num_values]: the number of updates, weights, first moments, second moments."""
    dense = model.dense_parameters()
    states = [optimizer.state.get(p, {}) for p in dense]
    num_updates = torch.stack([dense[0].new_tensor(float(states[0].get("step", 0.0)))])
    parts = [num_updates, *(p.detach().flatten() for p in dense)]
    for moment in _MOMENTS:
        for parameter, state in zip(dense, states, strict=True):
            parts.append(state.get(moment, torch.zeros_like(parameter)).detach().flatten())
    return torch.cat(parts)


def unpack(model: MoETransformer, optimizer: torch.optim.Optimizer, values: Tensor) -> None:
    """Take over what `pack` made on another rank."""
    dense = model.dense_parameters()
    sizes = [p.numel() for p in dense]
    num_updates, *parts = torch.split(values.to(dense[0].device), [1, *sizes * 3])
    for i, parameter in enumerate(dense):
        weights, first, second = (part.view_as(parameter) for part in parts[i :: len(dense)])
        with torch.no_grad():
            parameter.copy_(weights)
        if num_updates.item() > 0:
            optimizer.state[parameter] = {
                "step": torch.tensor(num_updates.item()),
                _MOMENTS[0]: first.clone(),
                _MOMENTS[1]: second.clone(),
            }
