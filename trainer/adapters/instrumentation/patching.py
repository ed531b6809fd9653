"""Calls of foreign objects go through ours, and hooks, until they are given back as they were."""

from collections.abc import Callable
from typing import Any

_MISSING = object()


class Wrapping:
    """Attributes of objects, not of their classes, and what stood there before."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []
        self._hooks: list[Any] = []

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """`owner.name(...)` becomes `around(original, ...)`."""
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        self.put(owner, name, wrapped)

    def put(self, owner: Any, name: str, value: Any) -> None:
        """`owner.name` is `value` from now on."""
        self._before.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def hold(self, *handles: Any) -> None:
        """Hooks of torch's modules, to be removed with the rest."""
        self._hooks += handles

    def undo(self) -> None:
        """No hook of ours is left, and all attributes are as they were, the last one first."""
        while self._hooks:
            self._hooks.pop(0).remove()
        while self._before:
            owner, name, before = self._before.pop()
            if before is _MISSING:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, before)
