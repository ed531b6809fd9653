"""A call that is refused while its request is on its way ends with the refusal itself."""

import asyncio
from collections.abc import Callable

import grpc
import pytest

from pacekeeper.controller.ingest import proxy
from pacekeeper.controller.ingest.proxy import CallOutcome

End = tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]
REFUSED: End = (grpc.StatusCode.UNAUTHENTICATED, "who are you?", (("k", "v"),))
CUT_OFF: End = (grpc.StatusCode.INTERNAL, "Internal error from Core", ())
BUG: End = (grpc.StatusCode.INTERNAL, "a bug of ours", ())


class Call:
    """Of a call of grpc.aio what is asked of one that is over; it may be over again."""

    def __init__(self) -> None:
        self.heard: list[Callable[[Call], None]] = []
        self.end = CUT_OFF

    def add_done_callback(self, callback: Callable[["Call"], None]) -> None:
        self.heard.append(callback)

    def is_over(self, end: End) -> None:
        self.end = end
        for callback in self.heard:
            callback(self)

    async def code(self) -> grpc.StatusCode:
        return self.end[0]

    async def details(self) -> str:
        return self.end[1]

    async def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return self.end[2]


@pytest.mark.parametrize(
    ("ends", "answer"),
    [
        ([REFUSED], REFUSED),
        ([REFUSED, CUT_OFF], REFUSED),
        ([CUT_OFF, REFUSED], REFUSED),
        ([BUG], BUG),
        ([CUT_OFF], CUT_OFF),
    ],
)
def test_of_several_ends_the_other_sides_own_counts(
    ends: list[End], answer: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "LOOK_S", 0.0)

    async def scene() -> object:
        call = Call()
        heard = CallOutcome(call)
        call.is_over(ends[0])
        asking = asyncio.create_task(heard.answer())
        await asyncio.sleep(0)
        for end in ends[1:]:
            call.is_over(end)
        return await asking

    assert asyncio.run(scene()) == answer
