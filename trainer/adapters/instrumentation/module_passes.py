"""When a torch module computes: from its forward pass to the end of its backward, waits left out.

Data-parallel wrappers end a backward pass by waiting for all ranks' gradients, in a callback that
they queue in the engine during the pass. Ours is queued before, as soon as the first gradient of
an output is known, and so runs first: when all gradients are computed and nobody was waited for.
What lies between the passes - a loss outside the module - is not counted. A forward pass that is
no training (evaluation, no gradients) or that a backward pass does again is passed over.

Hooks within a compiled graph would break it, or fail where it must be whole: while one is traced
they are empty. A module that was compiled as such is watched around its graph.
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
    """Is this thread in a backward pass: recomputing what a checkpoint left out, for instance?"""
    return bool(torch._C._current_graph_task_id() != -1)


def at_end_of_backward(call: Callable[[], None]) -> None:
    """`call` when the running backward pass has computed all; after those that were queued."""
    engine: Any = Variable._execution_engine
    engine.queue_callback(call)


class PassWatch:
    """Tells a teller of every training pass of a module, until it is closed."""

    def __init__(self, teller: StepReporter, module: torch.nn.Module, work_of: WorkOf) -> None:
        self._teller = teller
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
        """The module is as it was."""
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
            self._teller.pace.ring.count_error(error)
            work = NO_FEATURES
        self._teller.begin_microbatch(work)

    def _forward_ended(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._teller.is_computing or is_in_backward():
            return
        try:
            self._teller.pause()
            tensors = [t for t in tensors_in(output) if t.requires_grad]
            if tensors:
                register_multi_grad_hook(tensors, self._backward_begins, mode="any")
        except Exception as error:
            self._teller.pace.ring.count_error(error)

    def _backward_begins(self, gradient: Tensor) -> None:
        try:
            self._teller.resume()
            at_end_of_backward(self._teller.end_microbatch)
        except Exception as error:
            self._teller.pace.ring.count_error(error)


def computes_alone(model: torch.nn.Module) -> bool:
    """Does a rank compute a pass without the others? Where parameters are sharded (FSDP, tensor
    parallelism) every layer waits for all, and all ranks would look as slow as the slowest.
    """
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return False
    return not any(hasattr(parameter, "placements") for parameter in model.parameters())


def tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Of an output: a tensor, or what sequences and mappings hold, not far below."""
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
