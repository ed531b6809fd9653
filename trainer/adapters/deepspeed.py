"""DeepSpeed, watched: an engine's steps, passes, experts' rows and loads, by wrapping that engine.

    watch = adapter_deepspeed.watch(engine, job="my-run")   # after deepspeed.initialize
    ...                                                     # train as before
    watch.close()

Only this engine's own attributes and hooks are used; nothing of DeepSpeed is imported.
docs/trainer-deepspeed.md says what was tested and what can not be seen.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pacekeeper.trainer.adapters import reporter
from pacekeeper.trainer.adapters.instrumentation.expert_hooks import hooked
from pacekeeper.trainer.adapters.instrumentation.module_passes import COMPILED, is_in_backward
from pacekeeper.trainer.adapters.instrumentation.patching import Wrapping
from pacekeeper.trainer.adapters.microbatch_reporter import MicrobatchReporter, features_of_call
from pacekeeper.trainer.hooks.contexts import MicrobatchFeatures

WorkOf = Callable[[tuple[Any, ...], Mapping[str, Any]], MicrobatchFeatures]
_ONLY = "only"  # the key of micro-batches that never overlap


def watch(
    engine: Any,
    *,
    job: str,
    work_of: WorkOf = features_of_call,
    ring_dir: str | None = None,
) -> "EngineWatch":
    """Tell pacekeeper of every training step of `engine`, a DeepSpeedEngine or a PipelineEngine.

    `work_of` says what the model is called with (default: the shape of its first tensor); it must
    not read tensors of a device. Raises ValueError for a wrong job name only.
    """
    num_stages, num_shards = 1, getattr(engine, "mp_world_size", None) or 1
    if _is_pipeline(engine):  # to whose engine stages are model parallel, too
        num_stages, num_shards = engine.num_stages, engine.grid.model_parallel_size
    pace = reporter.attach(
        job=job,
        device=torch.device(engine.device),
        ring_dir=ring_dir,
        role=f"stage{engine.stage_id}" if num_stages > 1 else "train",
    )
    share = 1.0 / (num_stages * num_shards)
    return EngineWatch(MicrobatchReporter(pace, tensor_share=share), engine, work_of)


def _is_pipeline(engine: Any) -> bool:
    return hasattr(engine, "pipe_buffers")


class EngineWatch:
    """What was put around one engine."""

    def __init__(self, teller: MicrobatchReporter, engine: Any, work_of: WorkOf) -> None:
        self.teller = teller
        self.engine = engine
        self._work_of = work_of
        self._hides_rows = False  # those of its experts, within a compiled graph
        self._wrapping = Wrapping()
        teller.run_guarded(self._attach)

    def close(self) -> None:
        """The engine is as it was; the rank is done."""
        self._wrapping.undo()
        self.teller.detach()

    def _attach(self) -> None:
        engine = self.engine
        if _is_pipeline(engine):
            self._wrapping.wrap(engine, "train_batch", self._train_batch)
            self._attach_instructions()
        else:
            if getattr(engine.module, COMPILED, None) is not None:  # `engine.compile()`
                self._wrapping.wrap(engine.module, COMPILED, self._compiled)
                self._hides_rows = bool(_moe_layers(engine.module))
            else:
                self._wrapping.hold(
                    engine.module.register_forward_pre_hook(
                        self._forward_begins, prepend=True, with_kwargs=True
                    )
                )
            # Also run by backward passes that the engine is not asked for; there since 0.18.
            epilogue = "_backward_epilogue"
            self._wrapping.wrap(
                engine, epilogue if hasattr(engine, epilogue) else "backward", self._backward
            )
            self._wrapping.wrap(engine, "step", self._step)
        for layer, (gate, experts) in enumerate(_moe_layers(engine.module)):
            self._wrapping.hold(
                *hooked(self.teller, layer, gate, experts, lambda output: output[-1])
            )
        self.teller.collective_waits.attach()

    # -- an engine without pipeline

    def _forward_begins(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        if not module.training or not torch.is_grad_enabled() or is_in_backward():
            return
        self.teller.begin_step(self.engine.global_steps)
        if self._hides_rows:  # a hot expert would look like a slow rank
            return
        self.teller.enter_pass(_ONLY)
        self._tell_work(args, kwargs)

    def _compiled(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._forward_begins(self.engine.module, args, kwargs)
        return original(*args, **kwargs)

    def _tell_work(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.teller.add_features(
            self.teller.run_guarded(self._work_of, args, kwargs) or reporter.NO_FEATURES
        )

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self.teller.complete_pass()
        return result

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = self.engine.global_steps
        result = original(*args, **kwargs)
        if self.engine.global_steps != before:  # not within an accumulation of gradients
            self.teller.end_step()
        return result

    # -- pipelines

    def _train_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.teller.begin_step(self.engine.global_steps)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            self.teller.abandon_step()
            raise
        self.teller.end_step(loss=self.teller.run_guarded(_on_host, result))
        return result

    def _attach_instructions(self) -> None:
        teller = self.teller
        plain: dict[Any, Callable[..., Any]] = dict(self.engine._INSTRUCTION_MAP)
        kinds = {kind.__name__: kind for kind in plain}

        def load(engine: Any, buffer_id: int, **more: Any) -> None:
            teller.begin_loading()
            plain[kinds["LoadMicroBatch"]](engine, buffer_id=buffer_id, **more)
            teller.end_loading()

        def forward(engine: Any, buffer_id: int, **more: Any) -> None:
            teller.enter_pass(buffer_id)
            self._tell_work(teller.run_guarded(_inputs, engine, buffer_id) or (), {})
            plain[kinds["ForwardPass"]](engine, buffer_id=buffer_id, **more)
            teller.suspend_pass()

        def backward(engine: Any, buffer_id: int, **more: Any) -> None:
            teller.enter_pass(buffer_id)
            plain[kinds["BackwardPass"]](engine, buffer_id=buffer_id, **more)
            teller.complete_pass()

        ours = {
            **plain,
            kinds["LoadMicroBatch"]: load,
            kinds["ForwardPass"]: forward,
            kinds["BackwardPass"]: backward,
        }
        self._wrapping.put(self.engine, "_INSTRUCTION_MAP", ours)


def _moe_layers(module: Any) -> list[tuple[Any, Any]]:
    """(gate, experts) of each MoE layer: those of `deepspeed.moe` and those AutoEP replaced."""
    found = []
    for part in module.modules():
        match type(part).__name__:
            case "MOELayer":
                found.append((part.gate, part.experts))
            case "AutoEPMoELayer":
                found.append((part.router, part.experts))
    return found


def _inputs(engine: Any, buffer_id: int) -> tuple[Any, ...]:
    held = engine.pipe_buffers["inputs"][buffer_id]
    return held if isinstance(held, tuple) else (held,)


def _on_host(loss: Any) -> float | None:
    """Its value where reading it waits for no device."""
    return float(loss) if isinstance(loss, torch.Tensor) and loss.device.type == "cpu" else None
