"""Gathers dataclasses of numbers from all ranks, as values of the same type.

All ranks give the same structure: the same classes, tuples of the same lengths, None in the same
places. Integers must stay below 2^53.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

import torch

from pacekeeper.trainer.groups.group import Group

T = TypeVar("T")


def gather_values(own: T, group: Group) -> tuple[T, ...]:
    """Return the values of all ranks, in the order of `group.ranks`; all call it together.

    Args:
        own: A frozen dataclass of numbers, truth values, tuples of them, such dataclasses and None.
        group: Takes tensors in host memory.

    Raises:
        PeerLost: A rank is lost.
    """
    row = torch.tensor(list(numbers_of(own)), dtype=torch.float64)
    rows = [tuple(numbers) for numbers in group.all_gather(row).tolist()]
    values = {numbers: value_of(own, numbers) for numbers in set(rows)}  # most ranks vote alike
    return tuple(values[numbers] for numbers in rows)


def numbers_of(value: Any) -> Iterator[float]:
    """Yield the numbers of a value, in the order of its fields."""
    if is_dataclass(value):
        for field in fields(value):
            yield from numbers_of(getattr(value, field.name))
    elif isinstance(value, tuple):
        for one in value:
            yield from numbers_of(one)
    elif value is not None:
        yield float(value)


def value_of(like: T, numbers: Sequence[float]) -> T:
    """Return the value with these numbers and the structure of `like`."""
    rest = iter(numbers)
    value: T = _rebuilt(type(like), like, rest)
    assert next(rest, None) is None, "ranks gave other structures"
    return value


def _rebuilt(kind: Any, like: Any, rest: Iterator[float]) -> Any:
    if like is None:
        return None
    if is_dataclass(like):
        made: Any = type(like)
        kinds = _kinds(made)
        return made(**{name: _rebuilt(of, getattr(like, name), rest) for name, of in kinds.items()})
    if isinstance(like, tuple):
        (of, *_) = get_args(kind)
        return tuple(_rebuilt(of, one, rest) for one in like)
    # By the declared type: a rank may hold 0 where a float is meant.
    declared = next((one for one in (bool, int, float) if one in (kind, *get_args(kind))), None)
    assert declared is not None, f"expected a number, got a field of type {kind}"
    return declared(next(rest))


@cache
def _kinds(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}
