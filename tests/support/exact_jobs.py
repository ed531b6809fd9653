"""Jobs that compute in float64, and the losses of one process that nothing happens to.

Sums in another order differ by 1e-12 of themselves then, so that tests can ask for 1e-9. The files
of transformers insist on float32 here and there; `in_float64` makes them follow.
"""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from pacekeeper.core.checkpoint.manifest import CheckpointId
from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.trainer.checkpoint.reader import complete_ids
from pacekeeper.trainer.checkpoint.storage import open_storage
from pacekeeper.trainer.elastic import loop
from pacekeeper.trainer.elastic.launch_spec import RankSpec
from support.engine_jobs import small_job
from support.tiny_models import in_float64

TOLERANCE = 1e-9
_process = ExitStack()  # of a rank: in float64 to its end


def rank_in_float64(spec: RankSpec) -> None:
    """The body of a rank that computes in float64 where it would in float32 on the CPU."""
    config = spec.config
    if isinstance(config, EngineConfig) and (config.device, config.precision) == ("cpu", "float32"):
        from pacekeeper.trainer.engine import job

        def build_wide(config: Any, **shards: int) -> Any:
            skeleton = _build_wide(config, **shards)
            _process.enter_context(in_float64(skeleton.module))
            return skeleton

        vars(job)["build_skeleton"] = build_wide
    loop.rank_main(spec)


def _build_wide(config: Any, **shards: int) -> Any:
    from pacekeeper.trainer.model.skeleton import build_skeleton

    return build_skeleton(config, torch.float64, **shards)


def exact_job(folder: Path, **own: Any) -> EngineConfig:
    """Settings of a small job, two replicas of each expert, any of which fits on each rank."""
    settings: dict[str, Any] = {
        "job": "test",
        "steps": 24,
        "replicas": 2,
        "slots_per_rank": 4,
        "decay": "constant",
        "tick_s": 0.05,
    }
    return small_job(folder, **settings | own)


class _Undisturbed:
    """A job of one process, which trains as far as it is asked for."""

    def __init__(self, config: EngineConfig, skipped: frozenset[int], dtype: torch.dtype) -> None:
        from pacekeeper.trainer.engine import job
        from pacekeeper.trainer.engine.engine import Engine
        from pacekeeper.trainer.model.skeleton import build_skeleton

        assert config.decay == "constant", "a rate that depends on the number of steps"
        self.config = replace(config, replicas=1, slots_per_rank=0, num_stages=1, tensor_size=1)
        self.skipped = skipped
        self.is_wide = dtype == torch.float64
        with mock.patch.object(job, "build_skeleton", partial(build_skeleton, dtype=dtype)):
            self.job = job.prepare_job(self.config, (0,))
        options = job.engine_options(self.config, self.job, torch.device("cpu"))
        with self._computing():
            self.engine = Engine(
                self.job.skeleton, self.job.source, layout=self.job.layout, options=options
            )
        self.engine.add_optimizer(job.make_optimizer(self.config, self.engine))
        self.losses: list[float] = []

    def _computing(self) -> AbstractContextManager[None]:
        return in_float64(self.job.skeleton.module) if self.is_wide else nullcontext()

    def train(self, steps: int) -> None:
        from pacekeeper.trainer.engine.job import batch_of

        with self._computing():
            for step in range(self.engine.num_steps, steps):
                config = self.config
                rows = self.engine.micro_batches(config.rows_per_step, config.rows_per_microbatch)
                batch = batch_of(config, self.job.sampler, step, rows)
                prepared = self.engine.prepare_step(batch)
                self.engine.commit_step(prepared, is_applied=step not in self.skipped)
                self.losses.append(prepared.result.loss.item())


_known: dict[object, _Undisturbed] = {}


def undisturbed(
    config: EngineConfig,
    steps: int,
    skipped: Collection[int] = frozenset(),
    dtype: torch.dtype = torch.float64,
) -> list[float]:
    """The losses of the first `steps` steps of one process; `skipped` ones update nothing."""
    assert isinstance(config, EngineConfig)
    numbers = ("seed", "rows_per_step", "row_tokens", "separate_documents", "learning_rate")
    model, data = Path(config.model, "config.json"), [Path(one) for one in config.data]
    content = (model.read_text(), *(one.read_bytes() for one in data))
    key = (*(getattr(config, name) for name in numbers), content, frozenset(skipped), dtype)
    if key not in _known:
        _known[key] = _Undisturbed(config, frozenset(skipped), dtype)
    _known[key].train(steps)
    return _known[key].losses[:steps]


def assert_losses(
    lines: Sequence[dict[str, Any]], config: EngineConfig, first: int, end: int
) -> None:
    """Each step once from `first` until before `end`, with the losses of an undisturbed run."""
    assert [line["step"] for line in lines] == list(range(first, end))
    wanted = undisturbed(config, end)[first:]
    assert [line["loss"] for line in lines] == pytest.approx(wanted, rel=TOLERANCE)


def saving(config: EngineConfig, **own: Any) -> EngineConfig:
    """The job, which writes a checkpoint every 4 steps, beside its data."""
    folder = Path(config.model).parent / "kept"
    return replace(config, checkpoint_dir=str(folder), checkpoint_period_steps=4, **own)


def saved(config: EngineConfig) -> list[CheckpointId]:
    """Complete checkpoints, newest first."""
    return complete_ids(open_storage(f"{config.checkpoint_dir}/{config.job}"))
