"""Which ways through our code a case took: from line to line, told to the fuzzer if they are new.

Tracing costs three to five times the case, so that all are traced while new ways are found, and
then one in RARELY.
"""

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pacekeeper

HOME = str(Path(pacekeeper.__path__[0]))
RARELY = 8
PATIENCE = 3000  # traced cases without a new way until tracing becomes rare


class Ways:
    """All that were seen so far, and the files they are in."""

    def __init__(self) -> None:
        self.seen: set[tuple[CodeType, int, int]] = set()
        self.files: set[str] = set()
        self._is_ours: dict[CodeType, bool] = {}
        self._since_new = 0
        self._count = 0

    def run(self, call: Callable[[], Any]) -> tuple[Any, bool]:
        """(what the call returns, whether it went a new way)."""
        self._count += 1
        if self._since_new > PATIENCE and self._count % RARELY:
            return call(), False
        before = len(self.seen)
        sys.settrace(self._on_call)
        try:
            result = call()
        finally:
            sys.settrace(None)
        is_new = len(self.seen) > before
        self._since_new = 0 if is_new else self._since_new + 1
        return result, is_new

    def _on_call(self, frame: FrameType, _event: str, _value: Any) -> Any:
        code = frame.f_code
        is_ours = self._is_ours.get(code)
        if is_ours is None:
            is_ours = self._is_ours[code] = code.co_filename.startswith(HOME)
            if is_ours:
                self.files.add(code.co_filename)
        if not is_ours:
            return None
        seen, last = self.seen, 0

        def on_line(frame: FrameType, event: str, _value: Any) -> Any:
            nonlocal last
            if event == "line":
                line = frame.f_lineno
                way = (code, last, line)
                if way not in seen:
                    seen.add(way)
                last = line
            return on_line

        return on_line


def digest(files: list[str]) -> str:
    """Of the code in these files, named below the package."""
    found = hashlib.sha256()
    for name in sorted(files):
        path = Path(HOME) / name
        found.update(name.encode() + b"\0" + (path.read_bytes() if path.exists() else b"gone"))
    return found.hexdigest()
