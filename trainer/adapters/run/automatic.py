"""Attaches to a training script by itself when an optimizer has stepped.

A finder on `sys.meta_path` registers a hook on all optimizers as soon as the script has imported
torch's; nothing else is imported before. The model is the outermost module that holds parameters of
the optimizer. Steps before the attachment, usually the first one, are not reported. Nothing is
done if the script attaches itself.
"""

import gc
import logging
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pacekeeper.trainer.adapters.pytorch import TorchHooks

OPTIMIZERS = "torch.optim.optimizer"  # the module that runs the hooks of all optimizers
_log = logging.getLogger(__name__)


class _AfterImport:
    """Finder that calls `AutomaticAttachment` once the module of optimizers is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec, with a loader that also registers the hook."""
        if name != OPTIMIZERS:
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        spec = PathFinder.find_spec(name, path, target)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            execute = loader.exec_module

            def execute_and_watch(module: Any) -> None:
                execute(module)
                module.register_optimizer_step_post_hook(AutomaticAttachment())

            loader.exec_module = execute_and_watch
        return spec


def attach_after_import() -> None:
    """Attach to what this process will train, if it will train by torch's optimizers."""
    finder: Any = _AfterImport()
    sys.meta_path.insert(0, finder)


class AutomaticAttachment:
    """Hook of all optimizers: attaches at the first step of the first one, then adds the others."""

    def __init__(self) -> None:
        self.pace: TorchHooks | None = None
        self._is_over = False
        self._seen: set[int] = set()

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._is_over or id(optimizer) in self._seen:
            return
        self._seen.add(id(optimizer))
        try:
            self._add(optimizer)
        except Exception:
            self._is_over = True
            _log.warning("cannot attach: training continues unmonitored", exc_info=True)

    def _add(self, optimizer: Any) -> None:
        from pacekeeper.trainer.adapters import deepspeed, pytorch
        from pacekeeper.trainer.adapters.run.command import default_job
        from pacekeeper.trainer.hooks import ring_writer

        if self.pace is None and any(ring.is_armed for ring in ring_writer.rings):
            self._is_over = True
            _log.warning("the script attaches itself: `pacekeeper run` adds nothing")
            return
        engine = _deepspeed_engine(optimizer) if "deepspeed" in sys.modules else None
        if engine is not None:
            deepspeed.watch(engine, job=default_job())
            self._is_over = True
            return
        known = [] if self.pace is None else self.pace.watch.models
        models = outermost_owners(optimizer, known)
        if self.pace is None:
            if not models:
                _log.warning("steps only: the optimizer's parameters are of no module")
            self.pace = pytorch.attach(models, optimizer, step=_steps_done(optimizer))
            return
        for model in models:
            self.pace.watch.add_model(model)
        self.pace.watch.add_optimizer(optimizer)


def outermost_owners(optimizer: Any, known: Iterable[Any] = ()) -> list[Any]:
    """Return the outermost modules of this process that hold parameters of `optimizer`; none if
    a module of `known` holds one.
    """
    from torch import nn

    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if any(id(p) in wanted for module in known for p in module.parameters()):
        return []
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    holders: dict[int, list[Any]] = {}  # by module, the modules that it is a part of
    reached = []
    for module in modules:
        state = vars(module)
        for child in (state.get("_modules") or {}).values():
            holders.setdefault(id(child), []).append(module)
        if state.get("_orig_mod") is not None:  # a compiled module holds its own apart
            holders.setdefault(id(state["_orig_mod"]), []).append(module)
        if any(id(p) in wanted for p in (state.get("_parameters") or {}).values()):
            reached.append(module)
    found: dict[int, Any] = {}
    seen: set[int] = set()
    while reached:
        module = reached.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        above = holders.get(id(module), [])
        reached += above
        if not above:
            found[id(module)] = module
    return list(found.values())


def _deepspeed_engine(optimizer: Any) -> Any:
    """Return the engine of DeepSpeed that steps `optimizer`, None if there is none."""
    for one in gc.get_objects():
        is_engine = any(base.__name__ == "DeepSpeedEngine" for base in type(one).__mro__)
        if is_engine and getattr(one, "basic_optimizer", None) is optimizer:
            return one
    return None


def _steps_done(optimizer: Any) -> int:
    """Return how many steps the optimizer has made, also before a restart, if its state in host
    memory says so; else 1.
    """
    for state in optimizer.state.values():
        count: Any = state.get("step") if isinstance(state, dict) else None
        if isinstance(count, int) or getattr(getattr(count, "device", None), "type", "") == "cpu":
            return int(count)
        break
    return 1
