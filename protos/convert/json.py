"""Messages as plain values for JSON: names as in the protos, every field always there."""

import math
from typing import Any


def message_to_dict(message: Any) -> dict[str, Any]:
    """What is unset or not a finite number is null; whole numbers stay so, also 64-bit ones."""
    return {field.name: _plain(message, field) for field in message.DESCRIPTOR.fields}


def _plain(message: Any, field: Any) -> Any:
    value = getattr(message, field.name)
    if _is_repeated(field):
        return [_plain_one(field, item) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _plain_one(field, value)


def _is_repeated(field: Any) -> bool:
    """protobuf 7 took `label` away; 5.29 has no `is_repeated` yet."""
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    return bool(field.label == field.LABEL_REPEATED)


def _plain_one(field: Any, value: Any) -> Any:
    if field.type == field.TYPE_MESSAGE:
        return message_to_dict(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
