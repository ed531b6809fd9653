"""The tensors of a new model: each a function of the seed and its name only.

The same tensor is drawn on any rank, in any slot, under any layout and on any number of ranks:
each module by itself, on the CPU, by the library's own rule, and stacked experts one by one.
"""

import threading
from collections import defaultdict
from hashlib import blake2b

import torch

from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.model import library
from pacekeeper.trainer.model.skeleton import Skeleton, build_skeleton

_DRAWING = threading.Lock()  # weights are drawn from torch's one generator of the process


class SeededInitialization:
    """A source of new blocks.

    Args:
        skeleton: the model; it is not touched.
        seed: the job's seed.
    """

    def __init__(self, skeleton: Skeleton, seed: int) -> None:
        dtype = next(iter(skeleton.specs.values())).dtype
        self._skeleton = build_skeleton(skeleton.config, dtype)  # on meta, whatever is held
        self._seed = seed

    @property
    def fingerprint(self) -> str:
        """The seed."""
        return f"seed {self._seed}"

    def tensors(self, block: Block) -> dict[str, torch.Tensor]:
        """The tensors of `block` by name, on the CPU. Raises KeyError for an unknown block."""
        modules: dict[str, list[str]] = defaultdict(list)
        for name in self._skeleton.blocks[block]:
            modules[name.rpartition(".")[0]].append(name.rpartition(".")[2])
        drawn = {}
        expert = block.index if block.kind is BlockKind.EXPERT else None
        for module, names in modules.items():
            for name, value in self._draw(module, names, expert).items():
                drawn[f"{module}.{name}".removeprefix(".")] = value
        return {name: drawn[name] for name in self._skeleton.blocks[block]}

    def _draw(self, name: str, own: list[str], expert: int | None) -> dict[str, torch.Tensor]:
        """Draw the parameters and buffers `own` of a module, alone and real on the CPU."""
        model = self._skeleton.module
        module = model.get_submodule(name)
        parameters, buffers = dict(module._parameters), dict(module._buffers)
        for one in own:
            whole = getattr(module, one)
            shape = whole.shape if expert is None else (1, *whole.shape[1:])
            value = torch.zeros(shape, dtype=whole.dtype)
            if one in parameters:
                module._parameters[one] = torch.nn.Parameter(value, whole.requires_grad)
            else:
                module._buffers[one] = value
        try:
            with _DRAWING, torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(_seed_of(self._seed, name, expert))
                library.initialize_module(model, name)
            drawn = {one: getattr(module, one).detach() for one in own}
        finally:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        return drawn if expert is None else {one: value[0] for one, value in drawn.items()}


def _seed_of(seed: int, name: str, expert: int | None) -> int:
    """A generator seed by the job's seed, the module's name and the expert."""
    text = f"{seed}/{name}/{'' if expert is None else expert}"
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "little")
