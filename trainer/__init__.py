"""Hooks and adapters for any trainer, and the engine.

`hooks` and `adapters` report a training loop to the node's agent. `engine` trains models of
transformers: `model` holds their blocks, `parallel` spreads them over ranks, `groups` are its
collectives, `data` its batches. `elastic` survives and joins ranks, `checkpoint` saves and
restores, `emulation` emulates an accelerator.

`Engine` and what its callers need are importable from here, and loaded when they are first used:
the hooks need the standard library only.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pacekeeper.trainer.engine.engine import Engine
    from pacekeeper.trainer.engine.micro_batches import cross_entropy
    from pacekeeper.trainer.engine.routing import Balance
    from pacekeeper.trainer.engine.values import StepResult
    from pacekeeper.trainer.groups.engine_groups import EngineGroups
    from pacekeeper.trainer.parallel.layouts import start_layout

__all__ = ["Balance", "Engine", "EngineGroups", "StepResult", "cross_entropy", "start_layout"]

_MODULES = {
    "Balance": "engine.routing",
    "Engine": "engine.engine",
    "EngineGroups": "groups.engine_groups",
    "StepResult": "engine.values",
    "cross_entropy": "engine.micro_batches",
    "start_layout": "parallel.layouts",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
