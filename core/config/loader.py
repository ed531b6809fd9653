"""Reads settings from TOML text; every error names file, key and expectation.

Called by the commands (cli/common/settings.py) and by readers of scenario files. The classes of
settings validate their values (pydantic); this module makes plain sentences of what they reject.
"""

import re
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


@cache
def table_classes() -> dict[str, type]:
    """The class of each table of a file.

    Settings whose fields are settings again (`ControllerConfig.detector`) get these from the table
    of that name. They are imported when a file is read: a command without one needs its own only.
    """
    from pacekeeper.core.config.agent import AgentConfig
    from pacekeeper.core.config.client import ClientConfig
    from pacekeeper.core.config.controller import ControllerConfig, LeaseConfig, RetentionConfig
    from pacekeeper.core.config.detector import DetectorConfig
    from pacekeeper.core.config.engine import EngineConfig
    from pacekeeper.core.config.metrics import MetricsConfig, WebhookConfig
    from pacekeeper.core.config.policy import PolicyConfig
    from pacekeeper.core.config.security import AccessConfig, LimitsConfig, TlsConfig

    return {
        "agent": AgentConfig,
        "client": ClientConfig,
        "controller": ControllerConfig,
        "detector": DetectorConfig,
        "engine": EngineConfig,
        "policy": PolicyConfig,
        "access": AccessConfig,
        "limits": LimitsConfig,
        "metrics": MetricsConfig,
        "webhook": WebhookConfig,
        "lease": LeaseConfig,
        "retention": RetentionConfig,
        "tls": TlsConfig,
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
    tables = _checked(_read(text, file))
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
            errors.append(ConfigError(f"{file}: {name}: expected a table, got {_shown(values)}"))
        else:
            tables[name], found = _build(classes[name], values, f"{file}: [{name}]")
            errors += found
    return tables, errors


def read_table(kind: type[T], values: dict[str, Any], *, where: str) -> T:
    """One table as `kind`, a frozen dataclass; keys without default are required.

    Raises:
        ConfigError: keys or values are invalid; it names all of them and begins with `where`.
    """
    built = _build(_validating(kind), values, where)  # type: ignore[arg-type]
    return kind(**asdict(_checked(built)))


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
    changed: T = _checked(_build(type(settings), given, where, base=settings))
    return changed


def _checked(built: tuple[Any, list[ConfigError]]) -> Any:
    made, errors = built
    if errors:
        raise ConfigError("\n".join(map(str, errors)))
    return made


def _build(
    kind: type[T], values: dict[str, Any], where: str, base: T | None = None
) -> tuple[Any, list[ConfigError]]:
    """Settings of `values`, the others as in `base` or by default, and all errors.

    With errors, the settings are None or lack the unknown keys.
    """
    known = {f.name for f in fields(kind) if not _is_part(f)}  # type: ignore[arg-type]
    remedy = f"expected one of: {', '.join(sorted(known))}"
    unknown = [key for key in values if key not in known]
    errors = [ConfigError(f"{where} {key}: unknown key", remedy=remedy) for key in unknown]
    given = {key: value for key, value in values.items() if key in known}
    try:
        made: Any = kind(**given) if base is None else replace(base, **given)  # type: ignore[type-var]
    except ValidationError as error:
        found = (ConfigError(f"{where} {text}") for one in error.errors() for text in _texts(one))
        return None, [*errors, *found]
    return made, errors


def _is_part(setting: Field[Any]) -> bool:
    """Whether a field is a class of settings itself, read from a table of its own."""
    return is_dataclass(setting.default_factory)


def _texts(problem: ErrorDetails) -> list[str]:
    """Key and expectation of a problem that pydantic found; several where rules are violated."""
    key = "".join(f"{name}: " for name in problem["loc"])
    if problem["type"] == "value_error":  # of `reject`, `parsed` or `named`
        return [f"{key}{text}" for text in problem["ctx"]["error"].args]
    if problem["type"] == "missing":
        return [f"{key}missing"]
    expected = problem["msg"].replace("valid tuple", "array")
    expected = expected.replace("Input should be", "expected")
    expected = re.sub("^[A-Z][a-z]+ should have", "expected", expected)
    return [f"{key}{expected}, got {_shown(problem['input'])}"]


def _shown(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # an integer in hexadecimal digits, too long for Python to print
        return "one of too many digits"
