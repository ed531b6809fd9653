"""Building blocks of the settings classes: their decorator, bounded types, and cross-field checks.

Used by the other modules of this package. pydantic validates each value on construction, whether it
comes from a file, a command line or code. Nothing here reads a file.
"""

from collections.abc import Callable
from dataclasses import field
from functools import partial
from typing import Annotated, TypeVar, cast, dataclass_transform

from pydantic import AfterValidator, ConfigDict, Field, GetPydanticSchema
from pydantic.dataclasses import dataclass
from pydantic_core.core_schema import literal_schema

from pacekeeper.core.addresses import split_address, split_addresses

T = TypeVar("T")
MAX_WAIT_S = 7 * 86400.0  # of anything in a step: beyond, clocks of libraries overflow

# No conversions but of int to float, no unknown keys, no infinity. The validator of a class is
# built when its first value is made: a command that needs one class does not pay for all.
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, defer_build=True)

Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
Wait = Annotated[float, Field(gt=0.0, le=MAX_WAIT_S)]  # in seconds
NonEmpty = Annotated[str, Field(min_length=1)]


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def settings(kind: type[T]) -> type[T]:
    """Make a frozen, hashable dataclass whose values are validated on construction."""
    made = dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)(kind)
    return cast(type[T], made)


def reject(*violations: str | bool) -> None:
    """Raise ValueError with all texts "KEY: EXPECTATION"; a rule that holds gives none."""
    if texts := [text for text in violations if text]:
        raise ValueError(*texts)


def one_of(*values: str) -> GetPydanticSchema:
    """Accept one of these texts."""
    return GetPydanticSchema(lambda _kind, _handler: literal_schema([str(v) for v in values]))


def parsed(parse: Callable[[str], object], *, is_optional: bool = False) -> AfterValidator:
    """Accept a text that `parse` accepts, or an empty one if `is_optional`.

    Args:
        parse: raises ValueError, with what it expects, for any other text.
        is_optional: whether the text may be empty.
    """

    def check(text: str) -> str:
        if text or not is_optional:
            parse(text)
        return text

    return AfterValidator(check)


def named(is_valid: Callable[[str], bool], rule: str) -> AfterValidator:
    """Accept a text for which `is_valid` is true; `rule` describes such texts in the error."""

    def parse(text: str) -> None:
        if not is_valid(text):
            raise ValueError(f"expected {rule}, got {text!r}")

    return parsed(parse)


Addresses = Annotated[str, parsed(split_addresses)]  # of one host, or of several
OptionalAddress = Annotated[str, parsed(split_address, is_optional=True)]
Listener = Annotated[str, parsed(partial(split_address, first_port=0))]  # port 0: any free one
OptionalListener = Annotated[str, parsed(partial(split_address, first_port=0), is_optional=True)]
