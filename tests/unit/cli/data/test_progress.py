"""The line of progress: what it says, and when it is printed."""

from io import StringIO

import pytest

from pacekeeper.cli.data import progress
from pacekeeper.cli.data.progress import Progress, progress_text


def test_the_text() -> None:
    assert progress_text(25_000_000, 100_000_000, 10.0) == "25% of 100.0 MB, 2.5 MB/s, 0:00:30 left"
    assert progress_text(1, 7203, 1.0).endswith("2:00:02 left")
    assert progress_text(0, 100_000_000, 10.0) == "0% of 100.0 MB, 0.0 MB/s"


class Clock:
    """Stands for the module time."""

    def __init__(self) -> None:
        self.now_s = 5.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.mark.parametrize(("is_terminal", "period_s"), [(True, 0.5), (False, 30.0)])
def test_it_is_printed_once_a_period(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, period_s: float
) -> None:
    clock, stream = Clock(), StringIO()
    stream.isatty = lambda: is_terminal  # type: ignore[method-assign]
    monkeypatch.setattr(progress, "time", clock)
    shown = Progress(100, stream)
    for _ in range(8):
        clock.now_s += period_s / 2
        shown.update(10)
    assert stream.getvalue().count("10% of") == 4
    assert stream.getvalue().count("\n") == (0 if is_terminal else 4)
    assert shown.elapsed_s == 4 * period_s
    shown.close()
    assert stream.getvalue().endswith("\x1b[K" if is_terminal else "left\n")
