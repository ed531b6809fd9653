"""Batch shares in torchtitan: ranks accumulate gradients over unequal numbers of micro-batches.

torchtitan weights by tokens of the whole step by itself. What is ours: the count of each rank and
step, the streams of data of all ranks, of which each takes its part (`SharedStreams`, behind an
override of the loader), and when FSDP2 communicates. Imports nothing of torchtitan.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from pacekeeper.core.errors import ConfigError
from pacekeeper.core.layout.layout import Layout
from pacekeeper.trainer.adapters.batch_shares.dealing import ShareSchedule
from pacekeeper.trainer.adapters.batch_shares.shares import IGNORED, BatchShares
from pacekeeper.trainer.adapters.instrumentation.patching import Wrapping
from pacekeeper.trainer.hooks.hooks import Hooks

Batch = tuple[dict[str, Tensor], Tensor]
_ENDED: Any = object()


class SharedStreams:
    """The loaders of all data-parallel ranks, read by each rank; a loader of torchtitan.

    A step's micro-batches are those of rank 0, then those of rank 1, and so on, as many of each as
    without shares: with even shares each rank gets its own.

    Attributes:
        schedule: Of the job's shares; None: each rank gets its own stream.
    """

    schedule: ShareSchedule | None = None

    def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, **named: Any) -> None:
        """Build the loaders; `config.inner` has their settings."""
        self._rank = dp_rank
        self._loaders = [
            config.inner.build(dp_world_size=dp_world_size, dp_rank=rank, **named)
            for rank in range(dp_world_size)
        ]

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's micro-batches; ends on all ranks in the same step."""
        streams = [iter(loader) for loader in self._loaders]
        while True:
            per_rank, own = 1, range(self._rank, self._rank + 1)
            if self.schedule is not None:
                per_rank = self.schedule.micro_batches_per_step // len(streams)
                own = self.schedule.deal(self.schedule.num_dealt)
            # All are read before the first is computed: between steps the loaders are at one place.
            batches = [next(s, _ENDED) for s in streams for _ in range(per_rank)]
            if any(batch is _ENDED for batch in batches):
                return
            yield from batches[own.start : own.stop]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all loaders, as they save it without shares: by rank."""
        return {name: value for one in self._loaders for name, value in one.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set all loaders to the place they were saved at."""
        for loader in self._loaders:
            loader.load_state_dict(state)

    def close(self) -> None:
        """Close the loaders that can be closed."""
        for loader in self._loaders:
            getattr(loader, "close", lambda: None)()


class _Shares(BatchShares):
    def check(self, layout: Layout) -> None:
        super().check(layout)
        if min(layout.rows_of(self.schedule.micro_batches_per_step).values()) < 1:
            raise ValueError("a rank of torchtitan needs at least one micro-batch in each step")


class TrainerShares:
    """Batch shares of one torchtitan Trainer; wraps its step and passes until `close`."""

    def __init__(self, trainer: Any, pace: Hooks) -> None:
        """Begin with equal shares in the Trainer's next step.

        Args:
            trainer: As `require_settings` allows it.
            pace: Attached with `micro_batches_of(trainer)`.
        """
        self._trainer, self._pace = trainer, pace
        self._per_step = micro_batches_of(trainer)
        self._shares: BatchShares | None = None
        self._passes: Iterator[Batch] = iter(())
        self._num_left = 0  # passes of the step
        self._wrapping = Wrapping()
        self._wrapping.put(
            trainer, "gradient_accumulation_steps", trainer.gradient_accumulation_steps
        )
        self._wrapping.wrap(trainer, "train_step", self._train_step)
        self._wrapping.wrap(trainer, "forward_backward_step", self._pass)

    def close(self) -> None:
        """Give the Trainer its methods back."""
        self._wrapping.undo()

    def _train_step(self, original: Any, batches: Iterator[Batch]) -> Any:
        if self._shares is None:
            self._shares = self._begin()  # a checkpoint was loaded before
        schedule, own = self._shares.schedule, list[Batch]()
        self._num_left = schedule.at(self._trainer.step)[schedule.rank]
        self._trainer.gradient_accumulation_steps = self._num_left
        self._passes = self._shares.micro_batches(own)  # runs from the first pass on
        return original(_kept(batches, own))

    def _pass(self, original: Any, *args: Any, **named: Any) -> Any:
        next(self._passes)
        result = original(*args, **named)
        self._num_left -= 1
        if not self._num_left:
            next(self._passes, None)  # the step's exchange of gradients is over
        return result

    def _begin(self) -> BatchShares:
        trainer = self._trainer
        batch_mesh = trainer.parallel_dims.get_mesh("batch")
        schedule = ShareSchedule(
            rank=batch_mesh.get_local_rank(),
            num_ranks=batch_mesh.size(),
            micro_batches_per_step=self._per_step,
            first_step=trainer.step,
        )
        trainer.dataloader.schedule = schedule
        return _Shares(self._pace, trainer.model_parts[0], schedule, tokens_of=_tokens_in)


def micro_batches_of(trainer: Any) -> int:
    """Return the micro-batches of a step of all ranks together."""
    return int(trainer.gradient_accumulation_steps * trainer.parallel_dims.dp_shard)


def require_settings(trainer: Any) -> None:
    """Reject a Trainer whose ranks cannot run unequal numbers of micro-batches.

    Raises:
        ConfigError: Which setting excludes it.
    """
    dims = trainer.parallel_dims
    if max(dims.pp, dims.dp_replicate, dims.cp, dims.tp, dims.ep) > 1:
        raise ConfigError(
            "ranks meet in each pass, by tensor, context, pipeline, expert or replicated data "
            "parallelism: they cannot run unequal numbers of micro-batches",
            remedy="set these degrees to 1",
        )
    if hasattr(trainer.loss_fn, "set_lm_head"):
        raise ConfigError(
            "ChunkedLossWrapper adds up the head's gradients over all ranks in each micro-batch",
            remedy="use its loss_fn as the loss",
        )
    if not getattr(trainer.config.training, "disable_cuda_graphs", True):
        raise ConfigError(
            "CUDA graphs repeat one communication in each micro-batch",
            remedy="set --training.disable_cuda_graphs",
        )
    if not isinstance(trainer.dataloader, SharedStreams):
        raise ConfigError(
            "the loader reads the data of one rank only",
            remedy="name the override in --override.imports: docs/trainer-torchtitan.md",
        )


def _kept(batches: Iterator[Batch], own: list[Batch]) -> Iterator[Batch]:
    for batch in batches:
        own.append(batch)
        yield batch


def _tokens_in(batch: Batch) -> int:
    return int((batch[1] != IGNORED).sum())
