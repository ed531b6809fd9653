"""A disk whose power fails: what was never synced may be gone, in any mixture.

Files count by their content at the last `fsync`, directories by their names at theirs; of what came
later each piece may be there or not.
"""

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass(kw_only=True)
class Disk:
    """Watches all that is synced below `base`; `before_each` runs before each sync and unlink."""

    base: Path
    before_each: Callable[[], None] = lambda: None
    _names: dict[int, dict[str, int]] = field(default_factory=dict)  # of directories, by inode
    _contents: dict[int, bytes] = field(default_factory=dict)
    _held: list[int] = field(default_factory=list)  # descriptors: no inode is used again

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Until the end of the test."""
        fsync, unlink = os.fsync, os.unlink

        def synced(descriptor: int) -> None:
            self.before_each()
            fsync(descriptor)
            self._note(descriptor)

        def unlinked(path: Any, **values: Any) -> None:
            self.before_each()
            unlink(path, **values)

        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "unlink", unlinked)
        self._names[self.base.stat().st_ino] = {}

    def release(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)
        self._held.clear()

    def _note(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        inode = os.fstat(descriptor).st_ino
        if path.is_dir():
            entries = {name.name: name.inode() for name in os.scandir(path)}
            self._names[inode] = entries
        else:
            self._held.append(os.dup(descriptor))
            self._contents[inode] = path.read_bytes()

    def after_power_loss(self, target: Path, draw: random.Random, luck: float) -> None:
        """Make `target` what is left of `base`; of what was not synced, each with this `luck`."""
        self._left(self.base, self.base.stat().st_ino, target, draw, luck)

    def _left(
        self, now: Path | None, inode: int, target: Path, draw: random.Random, luck: float
    ) -> None:
        target.mkdir()
        there = {} if now is None else {e.name: e for e in os.scandir(now)}
        durable = self._names.get(inode, {})
        for name in sorted({*there, *durable}):
            entry = there.get(name)
            current = None if entry is None else entry.inode()
            kept = current if draw.random() < luck else durable.get(name)
            if kept is None:
                continue
            path = Path(entry.path) if entry is not None and kept == current else None
            if kept in self._names or (path is not None and path.is_dir()):
                self._left(path, kept, target / name, draw, luck)
            elif path is not None and draw.random() < luck:
                shutil.copyfile(path, target / name)
            else:
                (target / name).write_bytes(self._contents.get(kept, b""))
