"""`dataclasses.replace` in the interpreter's own loops: for large values that change all the time.

Of slotted classes only, and of those that have no rule of their own to be asked (`__post_init__`).
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from itertools import repeat
from operator import attrgetter, call
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class _Fields(NamedTuple):
    """How all fields of a class are read at once, how each is put, and where each stands."""

    get: Callable[[Any], tuple[Any, ...]]
    put: tuple[Callable[[Any, Any], None], ...]
    place: Mapping[str, int]


def fast_replace(value: T, **changes: Any) -> T:
    """The same with these fields changed. Raises TypeError for a name that is no field's."""
    kind: Any = type(value)
    known = _fields_of(kind)
    values = list(known.get(value))
    for name, changed in changes.items():
        if name not in known.place:
            raise TypeError(f"{kind.__name__} has no field {name!r}")
        values[known.place[name]] = changed
    made: T = object.__new__(kind)
    # All in loops of the interpreter's own: a frozen class's own way is a call for each field.
    deque(map(call, known.put, repeat(made), values), maxlen=0)
    return made


@cache
def _fields_of(kind: type[Any]) -> _Fields:
    names = tuple(field.name for field in fields(kind))
    assert len(names) > 1, "attrgetter gives no tuple of one"
    assert not hasattr(kind, "__post_init__"), f"{kind.__name__} has a rule of its own"
    return _Fields(
        get=attrgetter(*names),
        put=tuple(getattr(kind, name).__set__ for name in names),
        place={name: place for place, name in enumerate(names)},
    )
