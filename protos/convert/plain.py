"""Makes messages from records, and plain values for JSON from messages, by the fields' names."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)
_MISSING = object()


def message_of(kind: type[M], *sources: object, **given: Any) -> M:
    """A message with the equally named attributes of records.

    Args:
        kind: class of the message.
        sources: records; a field is taken from the first that has it.
        given: values of fields, instead.

    Raises:
        AttributeError: a field is neither given nor an attribute of the last source.
    """
    *preferred, last = sources
    for name in _field_names(kind.DESCRIPTOR):
        if name in given:
            continue
        value = _MISSING
        for source in preferred:
            if (value := getattr(source, name, _MISSING)) is not _MISSING:
                break
        given[name] = getattr(last, name) if value is _MISSING else value
    return kind(**given)


def columns_of(kind: type[M], rows: Sequence[object]) -> M:
    """A message whose repeated fields are the equally named attributes of `rows`."""
    return kind(
        **{name: [getattr(row, name) for row in rows] for name in _field_names(kind.DESCRIPTOR)}
    )


@cache
def _field_names(kind: Descriptor) -> tuple[str, ...]:
    return tuple(kind.fields_by_name)


def message_to_dict(message: Any) -> dict[str, Any]:
    """All fields of a message; unset fields and non-finite numbers are None.

    Unlike protobuf's own JSON mapping, 64-bit integers stay integers.
    """
    return {field.name: _plain(message, field) for field in message.DESCRIPTOR.fields}


def _plain(message: Any, field: Any) -> Any:
    value = getattr(message, field.name)
    if _is_repeated(field):
        return [_plain_one(field, item) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _plain_one(field, value)


def _is_repeated(field: Any) -> bool:
    """protobuf 7 has no `label`, 5.29 has no `is_repeated`."""
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    return bool(field.label == field.LABEL_REPEATED)


def _plain_one(field: Any, value: Any) -> Any:
    if field.type == field.TYPE_MESSAGE:
        return message_to_dict(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
