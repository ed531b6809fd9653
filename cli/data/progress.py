"""The progress of a long command on stderr: a line that is redrawn on a terminal, else a log."""

import sys
import time
from typing import TextIO

import click

TERMINAL_PERIOD_S = 0.5
LOG_PERIOD_S = 30.0


class Progress:
    """Prints how much of the input is done, with rate and time left, at most once a period.

    Args:
        total_bytes: of the input.
        stream: where to; None: stderr.
    """

    def __init__(self, total_bytes: int, stream: TextIO | None = None) -> None:
        self._total_bytes = total_bytes
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._start_mono_s = self._last_mono_s = time.monotonic()

    def update(self, done_bytes: int) -> None:
        """Print where the input stands, unless it was printed a moment ago."""
        now_s = time.monotonic()
        period_s = TERMINAL_PERIOD_S if self._is_terminal else LOG_PERIOD_S
        if now_s - self._last_mono_s < period_s:
            return
        self._last_mono_s = now_s
        text = progress_text(done_bytes, self._total_bytes, now_s - self._start_mono_s)
        self._print(f"\r\x1b[K{text}" if self._is_terminal else f"{text}\n")

    def close(self) -> None:
        """Clear the line of a terminal."""
        if self._is_terminal:
            self._print("\r\x1b[K")

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start_mono_s

    def _print(self, text: str) -> None:
        click.echo(text, file=self._stream, nl=False)


def progress_text(done_bytes: int, total_bytes: int, elapsed_s: float) -> str:
    """One line: share and bytes that are done, rate, and time left at this rate."""
    share = done_bytes / total_bytes if total_bytes else 1.0
    text = f"{share:.0%} of {format_mb(total_bytes)}, {format_mb(done_bytes / elapsed_s)}/s"
    if done_bytes:
        left_s = round((total_bytes - done_bytes) * elapsed_s / done_bytes)
        hours, minutes, seconds = left_s // 3600, left_s // 60 % 60, left_s % 60
        text += f", {hours}:{minutes:02}:{seconds:02} left"
    return text


def format_mb(size_bytes: float) -> str:
    """Megabytes with a digit after the point."""
    return f"{size_bytes / 1e6:,.1f} MB"
