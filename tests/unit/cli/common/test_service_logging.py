"""Nobody's name or error adds a line to a log, or moves the cursor of who reads it."""

import logging

import pytest

from pacekeeper.cli.common.service_logging import (
    TRACEBACK_HEAD_CHARS,
    TRACEBACK_TAIL_CHARS,
    OneLineFormatter,
)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("node=a attached", "node=a attached"),
        ("node=a\nagent=root let in", r"node=a\nagent=root let in"),
        ("\x1b[2Jx\u202e\x9b", r"\x1b[2Jx\u202e\x9b"),
        ("caf\xe9 \u4e2d", "caf\xe9 \u4e2d"),
    ],
)
def test_a_message_is_one_line(text: str, line: str) -> None:
    record = logging.LogRecord("x", logging.INFO, "f", 1, "%s", (text,), None)
    assert OneLineFormatter("t %(message)s").format(record) == f"t {line}"


def test_a_traceback_has_a_length_that_a_log_can_bear() -> None:
    def even(n: int) -> int:
        return odd(n + 1)

    def odd(n: int) -> int:
        return even(n + 1)

    def told(error: Exception) -> str:
        info = (type(error), error, error.__traceback__)
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "failed", (), info)
        return OneLineFormatter("%(message)s").format(record)

    try:
        even(0)
    except RecursionError as error:
        assert len(told(error)) < TRACEBACK_HEAD_CHARS + TRACEBACK_TAIL_CHARS + 100
    text = told(ValueError("a" * 50_000 + "end"))
    assert text.startswith("failed\nValueError: ") and text.endswith("end")
    left_out = len("ValueError: ") + 50_003 - TRACEBACK_HEAD_CHARS - TRACEBACK_TAIL_CHARS
    assert f"{left_out:,}" in text


def test_a_traceback_of_ours_keeps_its_lines() -> None:
    try:
        raise KeyError("x")
    except KeyError as error:
        info = (KeyError, error, error.__traceback__)
    record = logging.LogRecord("x", logging.INFO, "f", 1, "failed\n", (), info)
    first, *more = OneLineFormatter("%(message)s").format(record).splitlines()
    assert first == r"failed\n"
    assert more[0].startswith("Traceback")
