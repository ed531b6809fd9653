"""Times a torch module from its forward pass to the end of its backward, without waits.

Data-parallel wrappers end a backward pass by waiting for all ranks' gradients, in a callback that
they queue in the autograd engine during the pass. Our callback is queued earlier, at the first
gradient of an output, and so runs first: after all gradients are computed, before the wait. Time
between the passes, such as a loss outside the module, is not counted. Forward passes without
training (evaluation, no gradients) and recomputation are ignored.

Hooks would break a compiled graph, so they do nothing while one is traced. A module compiled as a
whole is wrapped around its graph.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook

from pacekeeper.trainer.adapters.instrumentation.patching import Wrapping
from pacekeeper.trainer.adapters.reporter import NO_FEATURES, StepReporter
from pacekeeper.trainer.hooks.contexts import MicrobatchFeatures

COMPILED = "_compiled_call_impl"  # what torch calls in the place of a compiled module
WorkOf = Callable[[tuple[Any, ...], Mapping[str, Any]], MicrobatchFeatures]


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass, for instance to recompute a forward."""
    return bool(torch._C._current_graph_task_id() != -1)


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call `call` at the end of the running backward pass, after callbacks queued before."""
    engine: Any = Variable._execution_engine
    engine.queue_callback(call)


class PassWatch:
    """Reports every training pass of a module until it is closed."""

    def __init__(self, reporter: StepReporter, module: torch.nn.Module, work_of: WorkOf) -> None:
        self._reporter = reporter
        self._work_of = work_of
        self._module = module
        self._wrapping = Wrapping()
        if getattr(module, COMPILED, None) is not None:  # `module.compile()`: hooks and all
            self._wrapping.wrap(module, COMPILED, self._compiled)
        else:
            self._wrapping.hold(
                module.register_forward_pre_hook(self._forward_begins, with_kwargs=True),
                module.register_forward_hook(self._forward_ended),
            )

    def close(self) -> None:
        """Remove the hooks from the module."""
        self._wrapping.undo()

    def _compiled(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._forward_begins(self._module, args, kwargs)
        output = original(*args, **kwargs)
        self._forward_ended(self._module, args, output)
        return output

    def _forward_begins(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if torch.compiler.is_compiling():
            return
        if not module.training or not torch.is_grad_enabled() or is_in_backward():
            return
        try:
            work = self._work_of(args, kwargs)
        except Exception as error:
            self._reporter.pace.ring.count_error(error)
            work = NO_FEATURES
        self._reporter.begin_microbatch(work)

    def _forward_ended(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._reporter.is_computing or is_in_backward():
            return
        try:
            self._reporter.pause()
            tensors = [t for t in tensors_in(output) if t.requires_grad]
            if tensors:
                register_multi_grad_hook(tensors, self._backward_begins, mode="any")
        except Exception as error:
            self._reporter.pace.ring.count_error(error)

    def _backward_begins(self, gradient: Tensor) -> None:
        try:
            self._reporter.resume()
            at_end_of_backward(self._reporter.end_microbatch)
        except Exception as error:
            self._reporter.pace.ring.count_error(error)


def computes_alone(model: torch.nn.Module) -> bool:
    """Whether a rank computes a pass without waiting for others.

    With sharded parameters (FSDP, tensor parallelism) every layer waits for all ranks, and all
    would look as slow as the slowest.
    """
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return False
    return not any(hasattr(parameter, "placements") for parameter in model.parameters())


def tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors of a module's output, in nested sequences and mappings to `depth`."""
    match value:
        case Tensor():
            yield value
        case Mapping() if depth:
            for part in value.values():
                yield from tensors_in(part, depth - 1)
        case list() | tuple() if depth:
            for part in value:
                yield from tensors_in(part, depth - 1)
        case _:
            pass
