"""Wraps attributes and registers hooks of foreign objects, and undoes all of it."""

import functools
from collections.abc import Callable
from typing import Any

_MISSING = object()


class Hook(functools.partial[Any]):
    """Hook of a foreign module. Copies and pickles of the module get one without effect: ours
    holds what can be neither copied nor pickled.
    """

    def __deepcopy__(self, memo: Any) -> "Hook":
        return Hook(_nothing)

    def __reduce__(self) -> Any:
        return Hook, (_nothing,)


def _nothing(*args: Any) -> None:
    """Do nothing."""


class WrappedMethod:
    """What is called in the place of a method of one module. Copies and pickles of the module get
    their own method.
    """

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        self._owner, self._name, self._call = owner, name, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        own = memo.get(id(self._owner), self._owner)
        return getattr(type(own), self._name).__get__(own)

    def __reduce__(self) -> Any:
        return _method_of, (type(self._owner), self._name, self._owner)


def _method_of(kind: type, name: str, owner: Any) -> Any:
    return getattr(kind, name).__get__(owner)


class Wrapping:
    """Replaced attributes of objects (not of their classes) with their previous values."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []
        self._hooks: list[Any] = []

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace `owner.name(...)` by `around(original, ...)`."""
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

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
