"""Whoever asks a store can stop waiting: a thread of its own asks, for a client has no deadline."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


class Desk:
    """A daemon thread that asks one store, so that its caller can stop waiting."""

    def __init__(self) -> None:
        self._questions: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[Any]] | None] = (
            SimpleQueue()
        )
        threading.Thread(target=self._answer, daemon=True, name="store").start()

    def put(self, question: tuple[Callable[[], Any], SimpleQueue[Any]]) -> None:
        """Ask; the answer (or the exception) goes into the question's own queue."""
        self._questions.put(question)

    def close(self) -> None:
        """End when what was asked is answered."""
        self._questions.put(None)

    def _answer(self) -> None:
        while (question := self._questions.get()) is not None:
            ask, answer = question
            try:
                answer.put(ask())
            except Exception as error:
                answer.put(error)
