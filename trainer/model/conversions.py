"""The library's tables between tensors on disk and in memory, applied to parts of a model.

Checkpoints name and cut tensors as their authors did: one tensor per expert, w1 and w3 apart,
transposed stacks. Reader and writer of checkpoints ask here; no family is known here.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from pacekeeper.trainer.model.library import conversion_mapping, core_model_loading
from pacekeeper.trainer.model.skeleton import Skeleton


@dataclass(frozen=True, eq=False)
class Conversion:
    """What makes tensors of a model of tensors on disk.

    Attributes:
        target: the first of the model's tensors that it makes.
        sources: names on disk by the pattern of the library's table, in the order of its lists.
    """

    target: str
    sources: Mapping[str, Sequence[str]]
    _skeleton: Skeleton
    _converter: Any

    @property
    def is_renaming(self) -> bool:
        """Whether the tensor on disk is that of the model, under another name at most."""
        return self._converter is None

    def run(
        self, tensors: Mapping[str, Sequence[torch.Tensor]], *, is_one_expert: bool = False
    ) -> dict[str, torch.Tensor]:
        """Convert the sources' tensors.

        Args:
            tensors: by pattern, in the order of the sources.
            is_one_expert: whether these are one expert's, and stacks of one are wanted.

        Returns:
            Tensors by their name in the model.
        """
        if self._converter is None:
            ((value,),) = tensors.values()
            return {self.target: value}
        converter = deepcopy(self._converter)
        for pattern, values in tensors.items():
            for name, value in zip(self.sources[pattern], values, strict=False):
                converter.add_tensor(self.target, name, pattern, value)
        specs = self._skeleton.specs

        def shape_of(name: str) -> tuple[int, ...] | None:
            shape = specs[name].shape if name in specs else None
            return (1, *shape[1:]) if shape and is_one_expert else shape

        model = _Model(self._skeleton.module, shape_of)
        made = converter.convert(self.target, model=model, config=self._skeleton.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }


class _Model:
    """The model as a conversion sees it: its parameters have the shapes of what is converted.

    Some conversions compare shapes, and a rank's stacks have its slots, not all experts.
    """

    def __init__(self, model: Any, shape_of: Callable[[str], tuple[int, ...] | None]) -> None:
        self._model = model
        self._shape_of = shape_of

    def get_parameter(self, name: str) -> Any:
        shape = self._shape_of(name)
        if shape is None:
            return self._model.get_parameter(name)
        return torch.empty(shape, device="meta")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def conversions(skeleton: Skeleton, names: Iterable[str]) -> tuple[list[Conversion], list[str]]:
    """Find what makes the model's tensors of those on disk.

    Args:
        skeleton: the model.
        names: the names on disk.

    Returns:
        The conversions, and names that the model has no use for; without those that the family
        ignores by itself.
    """
    model: Any = skeleton.module
    table = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [one for one in table if isinstance(one, core_model_loading.WeightRenaming)]
    converters = [one for one in table if isinstance(one, core_model_loading.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    state = model.state_dict()
    rename = core_model_loading.rename_source_key
    sources: dict[str, dict[str, list[str]]] = {}
    used: dict[str, Any] = {}
    foreign = []
    for name in sorted(names, key=core_model_loading.dot_natural_key):
        target, pattern = rename(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:
            target, pattern = rename(name, [], [], model.base_model_prefix, state)
        if target not in state:
            foreign.append(name)
            continue
        used.setdefault(target, None if pattern is None else by_pattern[pattern])
        sources.setdefault(target, {}).setdefault(pattern or name, []).append(name)
    ignored = [re.compile(one) for one in model._keys_to_ignore_on_load_unexpected or ()]
    found = [Conversion(target, of, skeleton, used[target]) for target, of in sources.items()]
    return found, [one for one in foreign if not any(p.search(one) for p in ignored)]


def to_disk(skeleton: Skeleton, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert some of the model's tensors to those that a checkpoint holds, by name on disk."""

    def shape_of(name: str) -> tuple[int, ...] | None:
        return tuple(tensors[name].shape) if name in tensors else None

    converted: dict[str, torch.Tensor] = core_model_loading.revert_weight_conversion(
        _Model(skeleton.module, shape_of), dict(tensors)
    )
    return converted
