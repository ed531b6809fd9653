"""Reads settings from TOML text; every error names file, key and expectation.

Called by the commands (cli/common/settings.py) and by readers of scenario files. The classes of
settings validate their values (pydantic); this module makes plain sentences of what they reject.
"""

import tomllib
from dataclasses import Field, asdict, fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.dataclasses import dataclass, is_pydantic_dataclass
from pydantic_core import ErrorDetails

from pacekeeper.core.config.base import STRICT
from pacekeeper.core.errors import ConfigError

T = TypeVar("T")

# What was expected, by pydantic's type of error.
_EXPECTED = {
    "bool_type": "bool",
    "float_type": "float",
    "int_type": "int",
    "string_type": "str",
    "finite_number": "a finite number",
    "greater_than": "a value above {gt:g}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "literal_error": "one of {expected}",
    "string_too_short": "a value that is not empty",
}


@cache
def table_classes() -> dict[str, type]:
    """The class of each table of a file.

    Settings whose fields are settings again (`ControllerConfig.detector`) get these from the table
    of that name. Imported when a file is read: a command without one needs its own class only,
    and all of them take a third longer to import.
    """
    from pacekeeper.core.config.agent import AgentConfig
    from pacekeeper.core.config.client import ClientConfig
    from pacekeeper.core.config.controller import ControllerConfig, LeaseConfig, RetentionConfig
    from pacekeeper.core.config.detector import DetectorConfig
    from pacekeeper.core.config.metrics import MetricsConfig, WebhookConfig
    from pacekeeper.core.config.policy import PolicyConfig
    from pacekeeper.core.config.security import AccessConfig, LimitsConfig, TlsConfig
    from pacekeeper.core.config.train import TrainConfig

    return {
        "agent": AgentConfig,
        "client": ClientConfig,
        "controller": ControllerConfig,
        "detector": DetectorConfig,
        "policy": PolicyConfig,
        "access": AccessConfig,
        "limits": LimitsConfig,
        "metrics": MetricsConfig,
        "webhook": WebhookConfig,
        "lease": LeaseConfig,
        "retention": RetentionConfig,
        "tls": TlsConfig,
        "train": TrainConfig,
    }


def read_config(kind: type[T], text: str, *, file: str) -> T:
    """The settings of `kind` in a TOML file.

    Args:
        kind: the class of the settings. Tables of other classes are checked, too.
        text: the content of the file.
        file: its name, for errors.

    Raises:
        ConfigError: the text is not TOML, or tables, keys or values are invalid. It names all of
            them, one a line.
    """
    tables, errors = _read(text, file)
    _raise(errors)
    own = next(name for name, known in table_classes().items() if known is kind)
    settings = tables.get(own, kind())
    parts = {f.name: tables[f.name] for f in fields(settings) if _is_part(f) and f.name in tables}
    found: T = replace(settings, **parts)
    return found


def find_errors(text: str, *, file: str) -> list[ConfigError]:
    """All errors in a file; empty: it is valid."""
    return _read(text, file)[1]


def _read(text: str, file: str) -> tuple[dict[str, Any], list[ConfigError]]:
    """The settings of each table in a file, and all errors."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        return {}, [ConfigError(f"{file}: not valid TOML: {error}")]
    classes = table_classes()
    tables: dict[str, Any] = {}
    errors: list[ConfigError] = []
    for name, values in document.items():
        if name not in classes:
            known = ", ".join(f"[{table}]" for table in classes)
            errors.append(
                ConfigError(f"{file}: unknown table [{name}]", remedy=f"expected one of {known}")
            )
        elif not isinstance(values, dict):
            errors.append(ConfigError(f"{file}: {name}: expected a table, got {_typed(values)}"))
        else:
            tables[name], found = _build(classes[name], values, f"{file}: [{name}]")
            errors += found
    return tables, errors


def read_table(kind: type[T], values: dict[str, Any], *, where: str) -> T:
    """One table as `kind`, a frozen dataclass; keys without default are required.

    Raises:
        ConfigError: keys or values are invalid; it names all of them and begins with `where`.
    """
    checked, errors = _build(_validating(kind), values, where)  # type: ignore[arg-type]
    _raise(errors)
    return kind(**asdict(checked))


@cache
def _validating(kind: type) -> type:
    """A subclass whose values are validated on construction; settings are that already."""
    if is_pydantic_dataclass(kind):
        return kind
    return dataclass(kind, frozen=True, kw_only=True, config=STRICT)


def override(settings: T, *, where: str = "command line", **values: Any) -> T:
    """`settings` with those `values` that are not None.

    Raises:
        ConfigError: values are invalid; it names all of them and begins with `where`.
    """
    given = {name: value for name, value in values.items() if value is not None}
    changed, errors = _build(type(settings), given, where, base=settings)
    _raise(errors)
    found: T = changed
    return found


def _raise(errors: list[ConfigError]) -> None:
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigError("\n".join(map(str, errors)))


def _build(
    kind: type[T], values: dict[str, Any], where: str, base: T | None = None
) -> tuple[Any, list[ConfigError]]:
    """Settings of `values`, the others as in `base` or by default, and all errors.

    With errors, the settings are None or lack the unknown keys.
    """
    known = {f.name: f.type for f in fields(kind) if not _is_part(f)}  # type: ignore[arg-type]
    expected = f"expected one of: {', '.join(sorted(known))}"
    errors = [
        ConfigError(f"{where} {key}: unknown key", remedy=expected)
        for key in values
        if key not in known
    ]
    given = {key: value for key, value in values.items() if key in known}
    try:
        made: Any = kind(**given) if base is None else replace(base, **given)  # type: ignore[type-var]
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            errors += _config_errors(problem, where, known)
        return None, errors
    return made, errors


def _is_part(setting: Field[Any]) -> bool:
    """Whether a field is a class of settings itself, read from a table of its own."""
    return is_dataclass(setting.default_factory)


def _config_errors(problem: ErrorDetails, where: str, types: dict[Any, Any]) -> list[ConfigError]:
    """One problem that pydantic found, in our words; several where rules are violated."""
    where = " ".join((where, *(f"{key}:" for key in problem["loc"])))
    kind, value, context = problem["type"], problem["input"], problem.get("ctx", {})
    if kind == "value_error":  # of `reject`, `parsed` or `named`
        return [ConfigError(f"{where} {text}") for text in context["error"].args]
    if kind == "missing":
        (missing,) = problem["loc"]
        return [ConfigError(f"{where} missing", remedy=f"expected {types[missing].__name__}")]
    expected = _EXPECTED[kind].format(**context)
    got = _typed(value) if kind.endswith("_type") else _shown(value)
    return [ConfigError(f"{where} expected {expected}, got {got}")]


def _typed(value: object) -> str:
    return f"{type(value).__name__} {_shown(value)}"


def _shown(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # an integer in hexadecimal digits, too long for Python to print
        return "of too many digits"
