"""How services log: on stderr, and a message is one line, whatever names and errors are in it."""

import logging
import sys


class OneLineFormatter(logging.Formatter):
    """What is not printable is shown as its code. Tracebacks of ours stay as they are."""

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
