"""How services log: on stderr, and a message is one line, whatever names and errors are in it."""

import logging
import sys
from typing import Any

TRACE_HEAD, TRACE_TAIL = 4_000, 12_000  # of a traceback, in characters: the last call says most


class OneLineFormatter(logging.Formatter):
    """What is not printable is shown as its code. Tracebacks of ours keep their lines, and a length
    that a log can bear: a deep recursion or an error's own words have none.
    """

    def formatException(self, ei: Any) -> str:
        text = super().formatException(ei)
        more = len(text) - TRACE_HEAD - TRACE_TAIL
        if more <= 0:
            return text
        return f"{text[:TRACE_HEAD]}\n... {more:,} characters more ...\n{text[-TRACE_TAIL:]}"

    def formatMessage(self, record: logging.LogRecord) -> str:
        message = super().formatMessage(record)
        if message.isprintable():
            return message
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)


def log_lines(name: str) -> None:
    """From now on, all that is worth to be known, under this name."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter(f"%(asctime)s {name} %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
