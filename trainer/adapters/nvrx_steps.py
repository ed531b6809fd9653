"""Sections of a step as the ring's moments: who names sections only says where steps end thereby.

A step ends where the trainer says so once per step, or, as long as it never has, where a section's
name comes again. Sections that compute are one micro-batch together; what they count is unknown, so
its work is untold. Where a model is given its passes are told, and no section.
"""

from collections.abc import Callable
from typing import Any

import torch

from pacekeeper.trainer.adapters.instrumentation.batch_features import work_of_batch
from pacekeeper.trainer.adapters.instrumentation.module_passes import PassWatch, computes_alone
from pacekeeper.trainer.adapters.reporter import Teller


class SectionSteps:
    """Attaches at the first section: by then ranks are known."""

    def __init__(
        self, make: Callable[[], Teller | None], model: torch.nn.Module | None = None
    ) -> None:
        self._make = make
        self._model = model
        self._teller: Teller | None = None
        self._watch: PassWatch | None = None
        self._is_attached = False
        self._is_told_steps = False
        self._step = 0
        self._names: set[str] = set()
        self._depth = 0  # of open sections
        self._computing = 0  # of those, that compute

    def enter(self, name: str, *, computes: bool) -> None:
        """A section begins."""
        teller = self._attached()
        if teller is None:
            return
        if name in self._names and not self._depth and not self._is_told_steps:
            self._end_step(teller)
        self._names.add(name)
        self._depth += 1
        teller.step_begins(self._step)
        if computes and self._model is None:
            if not self._computing:
                teller.goes_on() if teller.is_computing else teller.batch_begins()
            self._computing += 1

    def leave(self, *, computes: bool) -> None:
        """It ends, the newest that began."""
        self._depth = max(0, self._depth - 1)
        if computes and self._computing:
            self._computing -= 1
            if not self._computing and self._teller is not None:
                self._teller.waits()

    def fail(self) -> None:
        """It raised: what was computed in this step comes to nothing."""
        self._depth = self._computing = 0
        if self._teller is not None:
            self._teller.batch_fails()

    def next_step(self) -> None:
        """The trainer says that a step is over."""
        self._is_told_steps = True
        if self._teller is not None:
            self._end_step(self._teller)

    def suspect_ranks(self) -> frozenset[int]:
        """Of the controller's open findings, as far as they came here."""
        return self._teller.pace.suspect_ranks() if self._teller is not None else frozenset()

    def close(self) -> None:
        """The run is over: the step that is open was computed."""
        if self._watch is not None:
            self._watch.close()
        if self._teller is not None:
            self._end_step(self._teller)
            self._teller.detach()
        self._teller = self._watch = None

    def _end_step(self, teller: Teller) -> None:
        if self._model is None:
            teller.batch_ends()
        teller.step_ends()
        self._step += 1
        self._names, self._depth, self._computing = set(), 0, 0

    def _attached(self) -> Teller | None:
        if not self._is_attached:
            self._is_attached = True
            self._teller = self._make()
            model = self._model
            if self._teller is not None and model is not None and computes_alone(model):
                self._watch = PassWatch(self._teller, model, _work_of)
        return self._teller


def _work_of(passed: tuple[Any, ...], named: Any) -> Any:
    return work_of_batch({"input_ids": passed[0], **named} if passed else named)
