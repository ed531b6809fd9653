"""Reporter for micro-batches in several passes: pipelines, and trainers that split them.

A pass is a forward or a backward of one micro-batch. The micro-batch is reported after its last
pass; between passes its clock is suspended. `CollectiveWaits` excludes waits for other ranks within
a pass.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from torch import Tensor

from pacekeeper.core.telemetry.expert_row_features import KNOTS, rows_over
from pacekeeper.trainer.adapters.instrumentation.batch_features import features_of_batch
from pacekeeper.trainer.adapters.instrumentation.collectives import CollectiveWaits
from pacekeeper.trainer.adapters.instrumentation.expert_load import ExpertCounts
from pacekeeper.trainer.adapters.instrumentation.module_passes import is_in_backward
from pacekeeper.trainer.adapters.reporter import NO_FEATURES, StepReporter, never_raises
from pacekeeper.trainer.hooks.compute_timers import PipelineClock
from pacekeeper.trainer.hooks.contexts import MicrobatchFeatures
from pacekeeper.trainer.hooks.hooks import Hooks

_Item = TypeVar("_Item")


@dataclass(slots=True)
class _InFlightMicrobatch:
    """A micro-batch before its last pass: features so far, and its clock while suspended."""

    work: MicrobatchFeatures = NO_FEATURES
    expert_rows: int = 0
    num_active: int = 0
    rows_over: list[int] = field(default_factory=lambda: [0] * len(KNOTS))
    aside: Any = None


class MicrobatchReporter(StepReporter):
    """Reports steps and keyed micro-batches of one rank. Use it from the training thread."""

    def __init__(self, pace: Hooks, *, tensor_share: float = 1.0) -> None:
        """`tensor_share`: part of all layers that this rank holds."""
        super().__init__(pace)
        self.in_pass: Hashable = None  # key of the micro-batch that computes now
        self.collective_waits = CollectiveWaits(pace.timer, pace.ring.count_error)
        self.expert_counts = ExpertCounts(pace)
        self._clock = cast(PipelineClock, pace.timer)
        self._tensor_share = tensor_share
        self._open: dict[Hashable, _InFlightMicrobatch] = {}

    @never_raises
    def enter_pass(self, key: Hashable) -> None:
        """Start a pass of micro-batch `key`; ignored within another pass."""
        if self.step is None or self.in_pass is not None or self._away_s is not None:
            return
        known = self._open.get(key)
        if known is None:
            self._open[key] = _InFlightMicrobatch()
            self._clock.begin()
        else:
            self._clock.resume_suspended(known.aside)
        self.in_pass = key
        self.collective_waits.open_pass()

    @never_raises
    def suspend_pass(self) -> None:
        """End the pass; its micro-batch has further passes."""
        self.collective_waits.close_pass()
        key, self.in_pass = self.in_pass, None
        if key is not None:
            self._open[key].aside = self._clock.suspend()

    @never_raises
    def complete_pass(self) -> None:
        """End the last pass of a micro-batch and report it."""
        self.collective_waits.close_pass()
        key, self.in_pass = self.in_pass, None
        if key is None:
            return
        known, compute = self._open.pop(key), self._clock.end()
        tokens, squared, _, _, _, documents, head, _ = known.work
        rows = known.expert_rows, known.num_active, tuple(known.rows_over)
        self.pace.on_microbatch_end(
            compute, (tokens, squared, *rows, documents, head, self._tensor_share)
        )

    @never_raises
    def add_features(self, work: MicrobatchFeatures) -> None:
        """Add features to the micro-batch that computes now, such as those of a second forward."""
        known = self._open.get(self.in_pass)
        if known is not None:
            known.work = work if known.work is NO_FEATURES else add_features(known.work, work)

    @never_raises
    def add_expert_rows(self, counts: Sequence[int]) -> None:
        """Add the rows that a layer computes on each of this rank's experts."""
        known = self._open.get(self.in_pass)
        if known is not None and not is_in_backward():  # not when recomputed there
            known.expert_rows += sum(counts)
            known.num_active += sum(n > 0 for n in counts)
            for i, over in enumerate(rows_over(counts)):
                known.rows_over[i] += over

    @never_raises
    def add_expert_total(self, rows: int) -> None:
        """Add the sum of a layer's expert rows, if the counts are on the device."""
        known = self._open.get(self.in_pass)
        if known is not None and not is_in_backward():
            known.expert_rows += rows

    @never_raises
    def add_expert_loads(self, layer: int, counts: Tensor) -> None:
        """Add how many of this rank's tokens the router of `layer` sent to each expert."""
        if self.in_pass is not None and not is_in_backward():
            self.expert_counts.add(layer, counts)

    def begin_step(self, step: int) -> None:
        """Start an optimizer step; open passes of an earlier one are dropped."""
        if self.step != step:
            self._drop_passes()
        super().begin_step(step)

    def end_step(
        self, *, tokens: int = 0, loss: float | None = None, sum_len_squared: int = 0
    ) -> None:
        """Report the end of the step and its expert loads."""
        step = self.step
        if step is not None:
            self._report_counts(step)
        self._drop_passes()
        super().end_step(tokens=tokens, loss=loss, sum_len_squared=sum_len_squared)

    def abandon_step(self) -> None:
        """Drop the open step and its passes."""
        self._drop_passes()
        super().abandon_step()

    def detach(self) -> None:
        """Report late times and end the attachment."""
        self.collective_waits.detach()
        self._report_late()
        super().detach()

    def loading(self, items: Iterator[_Item]) -> Iterator[_Item]:
        """Iterate over `items`; waits for the next item are reported as waits for input."""
        while True:
            self.begin_loading()
            try:
                item = next(items)
            except StopIteration:
                self._loading_s = None
                return
            self.end_loading()
            yield item

    def run_guarded(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return `call(*args)`; if it raises, count the error and return None."""
        try:
            return call(*args)
        except Exception as error:
            self.pace.ring.count_error(error)
            return None

    @never_raises
    def _report_counts(self, step: int) -> None:
        self.expert_counts.end_step(step)

    @never_raises
    def _report_late(self) -> None:
        self.expert_counts.tell()

    def _drop_passes(self) -> None:
        """Drop passes without an end, whose forward was discarded."""
        self.collective_waits.close_pass()
        self.expert_counts.forget()
        self.in_pass = None
        self._open.clear()


def add_features(one: MicrobatchFeatures, more: MicrobatchFeatures) -> MicrobatchFeatures:
    """Add tokens, squared lengths and documents; a sum with an unknown part is unknown."""

    def both(a: int, b: int) -> int:
        return a + b if a and b else 0

    tokens, squared, documents = both(one[0], more[0]), both(one[1], more[1]), both(one[5], more[5])
    return (tokens, squared, one[2], one[3], one[4], documents, one[6] + more[6], one[7])


def features_of_call(arguments: Sequence[Any], named: Mapping[str, Any]) -> MicrobatchFeatures:
    """Return the features of a model call: of a batch by its keys, else of its first tensor
    [rows, tokens].
    """
    for batch in (named, *arguments):
        if isinstance(batch, Mapping) and (work := features_of_batch(batch)) != NO_FEATURES:
            return work
    for tensor in (*arguments, *named.values()):
        if isinstance(tensor, Tensor) and tensor.dim() >= 2:
            return features_of_batch({"input_ids": tensor})
    return NO_FEATURES
