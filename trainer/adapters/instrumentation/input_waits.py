"""Times the training thread's waits for batches of torch's data loaders.

While an `InputWaits` is attached, the iterators of `torch.utils.data.DataLoader` are timed. The
first batch of an iterator, which includes the start of its workers, is not; its phase is published.
"""

import contextlib
import functools
import threading
from typing import Any

from torch.utils.data import dataloader

from pacekeeper.trainer.adapters.reporter import Reporter

_NEXT = "__next__"
_ITERATOR: Any = dataloader._BaseDataLoaderIter
_listening: "list[InputWaits]" = []  # of this process; usually one
_original: list[Any] = []


class InputWaits:
    """Reports waits for input to `reporter`, from the thread that created it."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.thread = threading.get_ident()
        self.is_told = False  # the training loop reports this wait itself

    def attach(self) -> None:
        """Patch the iterators of data loaders."""
        if not _listening:
            _original.append(getattr(_ITERATOR, _NEXT))
            setattr(_ITERATOR, _NEXT, _timed(_original[0]))
        _listening.append(self)

    def detach(self) -> None:
        """Stop; the last one to detach restores the iterators."""
        with contextlib.suppress(ValueError):
            _listening.remove(self)
        if not _listening and _original:
            setattr(_ITERATOR, _NEXT, _original.pop())


def _timed(original: Any) -> Any:
    @functools.wraps(original)
    def following(iterator: Any) -> Any:
        here = threading.get_ident()
        waiting = [one for one in _listening if one.thread == here and not one.is_told]
        is_first = getattr(iterator, "_num_yielded", 0) == 0
        for one in waiting:
            one.reporter.begin_loading()
        try:
            item = original(iterator)
        except BaseException:
            is_first = True
            raise
        finally:
            for one in waiting:
                if is_first:
                    one.reporter.drop_loading()
                else:
                    one.reporter.end_loading()
        return item

    return following
