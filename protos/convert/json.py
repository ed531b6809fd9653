"""Converts messages to plain values for JSON, with the field names of the .proto files."""

import math
from typing import Any


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
