"""Times torch modules from a forward pass to the end of its backward, without waits.

Data-parallel wrappers end a backward pass by waiting for all ranks' gradients, in a callback that
they queue in the autograd engine during the pass. Our callback is queued earlier, at the first
gradient of an output, and so runs first: after all gradients are computed, before the wait. Time
between the passes, such as a loss outside the module, is not counted. Forward passes without
training (evaluation, no gradients) and recomputation are no micro-batches.

Hooks would break a compiled graph, so they do nothing while one is traced. A module compiled as a
whole is wrapped around its graph; of a Lightning module the training step is wrapped.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable

from pacekeeper.trainer.adapters.instrumentation.patching import Hook, WrappedMethod, Wrapping

COMPILED = "_compiled_call_impl"  # what torch calls in the place of a compiled module
_LIGHTNING = ("lightning.", "pytorch_lightning.")


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass, for instance to recompute a forward."""
    return bool(torch._C._current_graph_task_id() != -1)


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call `call` at the end of the running backward pass, after callbacks queued before."""
    engine: Any = Variable._execution_engine
    engine.queue_callback(call)


class PassListener(Protocol):
    """Receives the passes of the watched modules. No call may raise."""

    def begin_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Start the forward pass of a micro-batch; return False if it is not to be timed."""

    def end_forward(self, output: Any, kwargs: Mapping[str, Any], *, is_last: bool) -> None:
        """End the forward pass; `is_last`: no backward pass of this output follows."""

    def begin_backward(self) -> bool:
        """Start the backward pass of the open micro-batch; return False if none is open."""

    def end_backward(self) -> None:
        """End the backward pass: all gradients are computed."""

    def begin_evaluation(self) -> None:
        """Note a forward pass in evaluation mode."""

    def count_error(self, error: Exception) -> None:
        """Count an exception of a hook."""


class PassWatch:
    """Reports every training pass of the modules added, which share micro-batches, until closed."""

    def __init__(self, listener: PassListener) -> None:
        self._listener = listener
        self._wrapping = Wrapping()
        self._inside: torch.nn.Module | None = None  # whose forward pass is timed now
        self._manual: list[torch.nn.Module] = []  # whose training step makes the backward pass

    def add(self, module: torch.nn.Module) -> None:
        """Watch one more module."""
        if is_lightning(module):
            method = WrappedMethod(module, "training_step", self._around(module))
            self._wrapping.put(module, "training_step", method)
            if not getattr(module, "automatic_optimization", True):
                self._manual.append(module)
        elif getattr(module, COMPILED, None) is not None:  # the hooks would be compiled, too
            self._wrapping.wrap(module, COMPILED, self._around(module))
        else:
            self._wrapping.hold(
                module.register_forward_pre_hook(Hook(self._forward_begins), with_kwargs=True),
                module.register_forward_hook(Hook(self._forward_ended), with_kwargs=True),
            )

    def close(self) -> None:
        """Remove the hooks from the modules."""
        self._wrapping.undo()

    def _around(self, module: torch.nn.Module) -> Callable[..., Any]:
        def called(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._forward_begins(module, args, kwargs)
            output = original(*args, **kwargs)
            self._forward_ended(module, args, kwargs, output)
            return output

        return called

    def _forward_begins(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        if torch.compiler.is_compiling() or is_in_backward():
            return
        if self._inside is not None and self._inside is not module:
            return  # within the pass of another watched module
        try:
            if not module.training:
                self._listener.begin_evaluation()
            elif torch.is_grad_enabled():
                self._inside = module if self._listener.begin_forward(args, kwargs) else None
        except Exception as error:
            self._listener.count_error(error)

    def _forward_ended(
        self, module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any
    ) -> None:
        if torch.compiler.is_compiling() or self._inside is not module or is_in_backward():
            return
        self._inside = None
        try:
            is_last = any(one is module for one in self._manual)
            self._listener.end_forward(output, kwargs, is_last=is_last)
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:  # its first gradient begins the backward pass
                    tensor.grad_fn.register_prehook(self._backward_begins)
        except Exception as error:
            self._listener.count_error(error)

    def _backward_begins(self, gradients: Any) -> None:
        try:
            if self._listener.begin_backward():
                at_end_of_backward(self._listener.end_backward)
        except Exception as error:
            self._listener.count_error(error)


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
