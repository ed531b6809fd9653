"""Adapter for DeepSpeed: wraps an engine and reports its steps, passes, expert rows and loads.

    attached = watch(engine, job="my-run")  # after deepspeed.initialize
    ...                                     # train as before
    attached.close()

Uses only the engine's own attributes and hooks and imports nothing of DeepSpeed.
docs/trainer-deepspeed.md lists what was tested and what cannot be observed.
"""

from collections.abc import Callable
from typing import Any

import torch

from pacekeeper.trainer.adapters.instrumentation.batch_features import NO_FEATURES
from pacekeeper.trainer.adapters.instrumentation.expert_hooks import RoutedCounters, watch_experts
from pacekeeper.trainer.adapters.instrumentation.module_passes import CALL
from pacekeeper.trainer.adapters.instrumentation.patching import Wrapping
from pacekeeper.trainer.adapters.instrumentation.training_watch import TrainingWatch, WorkOf
from pacekeeper.trainer.adapters.reporter import Reporter, attach, features_of_call


def watch(
    engine: Any,
    *,
    job: str,
    work_of: WorkOf = features_of_call,
    ring_dir: str | None = None,
) -> "EngineWatch":
    """Report every training step of `engine`, a DeepSpeedEngine or a PipelineEngine.

    Args:
        engine: The engine.
        job: Name of the job.
        work_of: Returns the features of a model call (default: from the shape of its first
            tensor). It must not read tensors of a device.
        ring_dir: The agent's ring directory.

    Raises:
        ValueError: If the job name is invalid.
    """
    num_stages, num_shards = 1, getattr(engine, "mp_world_size", None) or 1
    if _is_pipeline(engine):  # whose engine counts stages as model parallel
        num_stages, num_shards = engine.num_stages, engine.grid.model_parallel_size
    pace = attach(
        job=job,
        device=torch.device(engine.device),
        ring_dir=ring_dir,
        role=f"stage{engine.stage_id}" if num_stages > 1 else "train",
    )
    share = 1.0 / (num_stages * num_shards)
    return EngineWatch(Reporter(pace, tensor_share=share), engine, work_of)


def _is_pipeline(engine: Any) -> bool:
    return hasattr(engine, "pipe_buffers")


class EngineWatch:
    """Hooks and wrapped attributes of one engine."""

    def __init__(self, reporter: Reporter, engine: Any, work_of: WorkOf) -> None:
        self.reporter = reporter
        self.engine = engine
        self._work_of = work_of
        self._wrapping = Wrapping()
        self._counters: RoutedCounters | None = None  # of a compiled module
        self._watch = TrainingWatch(
            reporter,
            torch.device(engine.device),
            step=lambda: int(engine.global_steps),
            work_of=work_of,
        )
        reporter.run_guarded(self._attach)

    def close(self) -> None:
        """Restore the engine and end the attachment."""
        self._wrapping.undo()
        self._watch.close()
        self.reporter.detach()

    def _attach(self) -> None:
        engine = self.engine
        self._wrapping.hold(*(handles := watch_experts(self.reporter, engine.module)))
        if _is_pipeline(engine):
            self._wrapping.wrap(engine, "train_batch", self._train_batch)
            self._attach_instructions()
        else:
            # `engine.compile()` hides the rows of experts: a hot one would look like a slow rank.
            is_compiled = getattr(engine.module, CALL, None) is not None
            self._watch.is_timed = not (is_compiled and handles)
            if is_compiled:
                self._counters = RoutedCounters(self.reporter, engine.module)
            self._watch.optimizers.append(engine)
            self._watch.add_passes(engine.module)
            self._wrapping.wrap(engine, "step", self._step)
            self._watch.input_waits.attach()
        self.reporter.clock.attach()

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = self.engine.global_steps
        result = original(*args, **kwargs)
        if self.engine.global_steps != before:  # not within an accumulation of gradients
            if self._counters is not None and self.reporter.step is not None:
                self.reporter.run_guarded(self._counters.report)
            self.reporter.run_guarded(self._watch.end_step)
        return result

    def _tell_work(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.reporter.add_features(
            self.reporter.run_guarded(self._work_of, args, kwargs) or NO_FEATURES
        )

    # -- pipelines

    def _train_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.reporter.begin_step(self.engine.global_steps)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            self.reporter.abandon_step()
            raise
        self.reporter.end_step(loss=self.reporter.run_guarded(_on_host, result))
        return result

    def _attach_instructions(self) -> None:
        reporter = self.reporter
        plain: dict[Any, Callable[..., Any]] = dict(self.engine._INSTRUCTION_MAP)
        kinds = {kind.__name__: kind for kind in plain}

        def load(engine: Any, buffer_id: int, **more: Any) -> None:
            reporter.begin_loading()
            plain[kinds["LoadMicroBatch"]](engine, buffer_id=buffer_id, **more)
            reporter.end_loading()

        def forward(engine: Any, buffer_id: int, **more: Any) -> None:
            reporter.enter_pass(buffer_id)
            self._tell_work(reporter.run_guarded(_inputs, engine, buffer_id) or (), {})
            plain[kinds["ForwardPass"]](engine, buffer_id=buffer_id, **more)
            reporter.suspend_pass()

        def backward(engine: Any, buffer_id: int, **more: Any) -> None:
            reporter.enter_pass(buffer_id)
            plain[kinds["BackwardPass"]](engine, buffer_id=buffer_id, **more)
            reporter.complete_pass()

        ours = {
            **plain,
            kinds["LoadMicroBatch"]: load,
            kinds["ForwardPass"]: forward,
            kinds["BackwardPass"]: backward,
        }
        self._wrapping.put(self.engine, "_INSTRUCTION_MAP", ours)


def _inputs(engine: Any, buffer_id: int) -> tuple[Any, ...]:
    held = engine.pipe_buffers["inputs"][buffer_id]
    return held if isinstance(held, tuple) else (held,)


def _on_host(loss: Any) -> float | None:
    """Return the value of a loss on the host, None if reading it would wait for a device."""
    return float(loss) if isinstance(loss, torch.Tensor) and loss.device.type == "cpu" else None
