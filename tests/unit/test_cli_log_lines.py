"""Nobody's name or error adds a line to a log, or moves the cursor of who reads it."""

import logging

import pytest

from pacekeeper.cli.log_lines import OneLineFormatter


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


def test_a_traceback_of_ours_keeps_its_lines() -> None:
    try:
        raise KeyError("x")
    except KeyError as error:
        info = (KeyError, error, error.__traceback__)
    record = logging.LogRecord("x", logging.INFO, "f", 1, "failed\n", (), info)
    first, *more = OneLineFormatter("%(message)s").format(record).splitlines()
    assert first == r"failed\n"
    assert more[0].startswith("Traceback")
