"""Facts of torch modules' passes: graphs, backward passes, tensors of an output.

Data-parallel wrappers end a backward pass by waiting for all ranks' gradients, in a callback that
they queue in the autograd engine during the pass. A callback that is queued earlier, at the first
gradient of an output, runs first: after all gradients are computed, before the wait.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

CALL = "_compiled_call_impl"  # what torch calls in the place of a module's own call, unless None
_LIGHTNING = ("lightning.", "pytorch_lightning.")


is_traced = torch.compiler.is_dynamo_compiling  # whether a graph is traced: hooks would break it
_engine: Any = Variable._execution_engine
# Calls what it is given at the end of the running backward pass, after callbacks queued before.
at_end_of_backward: Callable[[Callable[[], None]], None] = _engine.queue_callback
graph_task = torch._C._current_graph_task_id  # of the backward pass that this thread runs; -1: none


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass, for instance to recompute a forward."""
    return bool(graph_task() != -1)


class GradientHook:
    """Calls `call` with the gradient of each tensor that it is put on.

    The same as `Tensor.register_hook` of each, at a quarter of its cost: the hook lies in a tensor
    of our own, from which torch reads it, so that none is made per tensor.
    """

    def __init__(self, call: Callable[[Tensor], None]) -> None:
        self._call = call
        self._holder = torch.zeros((), requires_grad=True)
        self._holder._backward_hooks = OrderedDict({0: call})

    def put_on(self, tensor: Tensor) -> None:
        """Call back when the gradient of `tensor` is computed; none is computed for a leaf."""
        node = tensor.grad_fn
        if node is not None:
            if tensor.output_nr == 0:  # as the holder's
                node._register_hook_dict(self._holder)
            else:
                tensor.register_hook(self._call)


def is_lightning(module: torch.nn.Module) -> bool:
    """Whether `module` is a Lightning module, whose trainer calls its training step."""
    return hasattr(type(module), "training_step") and any(
        base.__module__.startswith(_LIGHTNING) for base in type(module).__mro__
    )


def tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors of a module's output, in nested sequences and mappings to `depth`."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part, depth - 1)
    elif depth and isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part, depth - 1)
