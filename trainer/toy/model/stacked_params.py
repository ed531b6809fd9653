"""Like blocks of one layer that a rank holds - experts, attention shards - stacked: [S, ...] each.

A move changes the rows and never the names; a block's own tensors know nothing of the layout.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


class StackedParams(nn.Module):
    """The blocks `held`, by number, ascending; a parameter [S, *shape] for each name in `shapes`.

    `drawn` makes the tensors of one block, the same on every rank.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        held: tuple[int, ...],
        drawn: Callable[[int], Mapping[str, Tensor]],
    ) -> None:
        super().__init__()
        self.shapes = dict(shapes)
        blocks = [drawn(number) for number in held]
        self.replace(
            held,
            {
                name: torch.stack([block[name] for block in blocks])
                if blocks
                else torch.empty(0, *shape, dtype=dtype)
                for name, shape in shapes.items()
            },
        )

    def replace(self, held: tuple[int, ...], tensors: Mapping[str, Tensor]) -> None:
        """Hold other blocks from now on: fresh parameters with the given values."""
        self.held = held
        for name in self.shapes:
            setattr(self, name, nn.Parameter(tensors[name]))
