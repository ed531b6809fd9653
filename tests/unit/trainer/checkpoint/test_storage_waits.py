"""Who waits for storage says so, and gives up where nothing comes."""

import threading
from collections.abc import Iterator

import pytest

from pacekeeper.trainer.checkpoint import storage
from pacekeeper.trainer.checkpoint.storage import answered, wait_aloud


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Storage that hangs until it is opened."""
    gate = threading.Event()
    yield gate
    gate.set()


def test_an_answer_comes_back_and_so_does_an_error() -> None:
    assert answered(lambda: 7, "it", 60.0) == 7

    def refuse() -> int:
        raise PermissionError(13, "Permission denied")

    with pytest.raises(PermissionError, match="Permission denied"):
        answered(refuse, "it", 60.0)


def test_what_hangs_is_said_and_given_up(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(storage, "SAY_AFTER_S", 0.02)
    with pytest.raises(TimeoutError, match="no answer for 0 s"):
        answered(gate.wait, "a list of /shared", 0.1)
    assert "still waits for a list of /shared" in caplog.text


def test_what_goes_on_is_not_given_up(gate: threading.Event) -> None:
    """Longer than the patience, but something comes each time it is looked at."""
    seen: list[int] = []

    def progress() -> int:
        seen.append(0)
        if len(seen) == 8:
            gate.set()
        return len(seen)

    assert answered(gate.wait, "it", 0.02, progress) is True


def test_a_wait_ends_with_what_it_waits_for_or_with_its_time() -> None:
    asked: list[float] = []

    def wait(timeout_s: float) -> bool:
        asked.append(timeout_s)
        return len(asked) == 3

    assert wait_aloud(wait, "it", 60.0)
    assert len(asked) == 3 and asked[0] == storage.SAY_AFTER_S
    assert not wait_aloud(lambda timeout_s: False, "it", 0.0)
