"""The tensors of a new model: each a function of the seed and its name only.

The same tensor is drawn on any rank, in any slot, under any layout and on any number of ranks:
each module by itself, on the CPU, by the library's own rule, and stacked experts one by one.
"""

import threading
from collections import defaultdict
from dataclasses import replace
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
        self._blocks, self._cuts = skeleton.blocks, skeleton.cuts
        self._skeleton = build_skeleton(skeleton.config, dtype)  # on meta, undivided
        self._seed = seed
        # Tensors of one module and one block of the undivided model are drawn together.
        self._together: dict[str, list[str]] = {}
        for specs in self._skeleton.blocks.values():
            by_module: dict[str, list[str]] = defaultdict(list)
            for name in specs:
                module, _, own = name.rpartition(".")
                by_module[module].append(own)
                self._together[name] = by_module[module]
        self._divided: tuple[Block | None, dict[str, torch.Tensor]] = None, {}

    @property
    def fingerprint(self) -> str:
        """The seed."""
        return f"seed {self._seed}"

    def tensors(self, block: Block) -> dict[str, torch.Tensor]:
        """The tensors of `block` by name, on the CPU. Raises KeyError for an unknown block."""
        specs = self._blocks[block]
        expert = block.index if block.kind is BlockKind.EXPERT else None
        drawn: dict[str, torch.Tensor] = {}
        if any(name in self._cuts for name in specs):  # its other shards are likely wanted next
            of_all = replace(block, index=0)
            if self._divided[0] != of_all:
                self._divided = of_all, {}
            drawn = self._divided[1]
        for name in specs:
            if name not in drawn:
                module = name.rpartition(".")[0]
                for own, value in self._draw(module, self._together[name], expert).items():
                    drawn[f"{module}.{own}".removeprefix(".")] = value
        return {
            name: self._cuts[name].piece(drawn[name], block.index, self._cuts[name].num_shards)
            if name in self._cuts
            else drawn[name]
            for name in specs
        }

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
