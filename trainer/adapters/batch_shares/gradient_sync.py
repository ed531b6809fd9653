"""Gradients are summed over the ranks once a step, however many micro-batches a rank runs.

DistributedDataParallel communicates in the last backward pass only. FSDP2 communicates in every
pass by default, so that ranks would have to run equally many: here parameters are gathered in the
first pass of a step, stay whole, and gradients are scattered in the last one (as in ZeRO-2).
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pacekeeper.core.errors import ConfigError

Sync = Callable[[bool], AbstractContextManager[None]]
"""Returns the context of one micro-batch; the argument is whether it is the step's last one."""


def gradient_sync(model: nn.Module, num_ranks: int) -> Sync:
    """Return how `model` averages gradients over `num_ranks` ranks.

    Raises:
        ConfigError: Neither DistributedDataParallel nor FSDP2 does it.
    """
    inner = getattr(model, "_orig_mod", model)  # of torch.compile
    if isinstance(inner, DistributedDataParallel):
        return lambda is_last: contextlib.nullcontext() if is_last else inner.no_sync()
    sharded = [module for module in inner.modules() if hasattr(module, "_get_fsdp_state")]
    if sharded:
        return ShardedSync(sharded)
    if num_ranks > 1:
        raise ConfigError(
            f"{type(inner).__name__}: gradients of {num_ranks} ranks are not averaged",
            remedy="pass the model as DistributedDataParallel or fully_shard returned it",
        )
    return lambda is_last: contextlib.nullcontext()


class ShardedSync:
    """Gathers parameters of FSDP2 modules once a step, and scatters gradients once."""

    def __init__(self, modules: list[Any]) -> None:
        self._modules = modules
        self._undo: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def __call__(self, is_last: bool) -> Iterator[None]:
        """Enter a micro-batch; after the last one parameters are sharded as the user wants."""
        if not self._undo:
            self._keep_whole()
        for module in self._modules:
            module.set_requires_gradient_sync(is_last, recurse=False)
            module.set_reshard_after_backward(is_last, recurse=False)
        try:
            yield
        finally:
            if is_last:
                while self._undo:
                    self._undo.pop()()

    def _keep_whole(self) -> None:
        for module in self._modules:
            state = module._get_fsdp_state()
            self._undo.append(_restoring(state, "_auto_reshard_after_forward"))
            for group in _parameter_groups(state):
                for name in ("post_forward_mesh_info", "reshard_after_backward"):
                    self._undo.append(_restoring(group, name))
            module.set_reshard_after_forward(False, recurse=False)


def _parameter_groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)  # since torch 2.13
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _restoring(owner: Any, name: str) -> Callable[[], None]:
    value = getattr(owner, name, None)
    return lambda: setattr(owner, name, value)
