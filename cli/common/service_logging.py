"""Logging of the services: to stderr, one line per message whatever text is in it.

Called by `pacekeeper agent` and `pacekeeper controller` before they start.
"""

import logging
import sys
from typing import Any

TRACEBACK_HEAD_CHARS, TRACEBACK_TAIL_CHARS = (
    4_000,
    12_000,
)  # the end names the failing call


class OneLineFormatter(logging.Formatter):
    """Escapes what is not printable, so that no name or error adds a line to the log.

    Tracebacks keep their lines and are cut in the middle: a deep recursion has no bounded length.
    """

    def formatException(self, ei: Any) -> str:
        text = super().formatException(ei)
        more = len(text) - TRACEBACK_HEAD_CHARS - TRACEBACK_TAIL_CHARS
        if more <= 0:
            return text
        head, tail = text[:TRACEBACK_HEAD_CHARS], text[-TRACEBACK_TAIL_CHARS:]
        return f"{head}\n... {more:,} characters omitted ...\n{tail}"

    def formatMessage(self, record: logging.LogRecord) -> str:
        message = super().formatMessage(record)
        if message.isprintable():
            return message
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)


def configure_logging(name: str) -> None:
    """Log messages from INFO on to stderr, each prefixed with time and `name`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter(f"%(asctime)s {name} %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
