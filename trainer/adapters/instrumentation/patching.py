"""Wraps attributes and registers hooks of foreign objects, and undoes all of it."""

from collections.abc import Callable
from typing import Any

_MISSING = object()


class Wrapping:
    """Replaced attributes of objects (not of their classes) with their previous values."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []
        self._hooks: list[Any] = []

    def wrap(self, owner: Any, name: str, wait_block: Callable[..., Any]) -> None:
        """Replace `owner.name(...)` by `around(original, ...)`."""
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wait_block(original, *args, **kwargs)

        self.put(owner, name, wrapped)

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name` to `value`."""
        self._before.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def hold(self, *handles: Any) -> None:
        """Keep handles of module hooks, to be removed by `undo`."""
        self._hooks += handles

    def undo(self) -> None:
        """Remove all hooks and restore all attributes, the last one first."""
        while self._hooks:
            self._hooks.pop(0).remove()
        while self._before:
            owner, name, before = self._before.pop()
            if before is _MISSING:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, before)
