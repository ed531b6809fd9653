"""Reads settings from TOML text; every error names file, key and expectation."""

import tomllib
from dataclasses import MISSING, fields, is_dataclass, replace
from math import inf, isfinite
from typing import Any, TypeVar

from pacekeeper.core.config.agent import AgentConfig
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.errors import ConfigError

T = TypeVar("T")

_TABLES: tuple[tuple[str, type, str], ...] = (  # (table, settings it is of, their part)
    ("agent", AgentConfig, ""),
    ("client", ClientConfig, ""),
    ("controller", ControllerConfig, ""),
    ("detector", ControllerConfig, "detector"),
    ("policy", ControllerConfig, "policy"),
    ("access", ControllerConfig, "access"),
    ("limits", ControllerConfig, "limits"),
    ("metrics", AgentConfig, "metrics"),
    ("metrics", ControllerConfig, "metrics"),
    ("webhook", ControllerConfig, "webhook"),
    ("lease", ControllerConfig, "lease"),
    ("retention", ControllerConfig, "retention"),
    ("tls", AgentConfig, "tls"),
    ("tls", ClientConfig, "tls"),
    ("tls", ControllerConfig, "tls"),
    ("train", TrainConfig, ""),
)


def read_config(kind: type[T], text: str, *, file: str) -> T:
    """The settings of `kind` in a TOML file.

    Args:
        kind: the class of the settings. Tables of other classes are checked, too.
        text: the content of the file.
        file: its name, for errors.

    Raises:
        ConfigError: the text is not TOML, or a table, key or value is invalid.
    """
    settings: T = _read(_document(text, file), file)[kind]
    return settings


def _document(text: str, file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from None


def _read(document: dict[str, Any], file: str) -> dict[type, Any]:
    """The settings of every kind."""
    known = tuple(dict.fromkeys(table for table, _, _ in _TABLES))
    for table in document:
        if table not in known:
            raise ConfigError(
                f"{file}: unknown table [{table}]",
                remedy=f"expected one of {', '.join(f'[{name}]' for name in known)}",
            )
    result: dict[type, Any] = {}
    for table, owner, part in _TABLES:
        base = result.get(owner, owner())
        values = document.get(table, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{file}: {table}: expected a table, got {_kind_of(values)}")
        where = f"{file}: [{table}]"
        if part:
            base = replace(base, **{part: _build(type(getattr(base, part)), values, where)})
        else:
            base = _build(owner, values, where, base)
        result[owner] = base
    return result


def find_errors(text: str, *, file: str) -> list[ConfigError]:
    """All errors in a file, key by key where a single key is at fault; empty: it is valid."""
    try:
        document = _document(text, file)
    except ConfigError as error:
        return [error]
    found: list[ConfigError] = []
    for table, values in document.items():
        whole = _complaint({table: values}, file)
        if whole is not None:
            keys = values.items() if isinstance(values, dict) else ()
            alone = [_complaint({table: {key: value}}, file) for key, value in keys]
            found += [one for one in alone if one is not None] or [whole]
    return found


def _complaint(document: dict[str, Any], file: str) -> ConfigError | None:
    try:
        _read(document, file)
    except ConfigError as error:
        return error
    return None


def read_table(kind: type[T], values: dict[str, Any], *, where: str) -> T:
    """One table as `kind`; keys without default are required. Errors begin with `where`."""
    for known in fields(kind):  # type: ignore[arg-type]
        is_needed = known.default is MISSING and known.default_factory is MISSING
        if is_needed and known.name not in values:
            name = known.type.__name__ if isinstance(known.type, type) else str(known.type)
            raise ConfigError(f"{where} {known.name}: missing", remedy=f"expected {name}")
    return _build(kind, values, where)


def override(settings: T, *, where: str = "command line", **values: Any) -> T:
    """`settings` with those `values` that are not None; errors begin with `where`."""
    given = {name: value for name, value in values.items() if value is not None}
    return _build(type(settings), given, where, settings)


def _build(kind: type[T], values: dict[str, Any], where: str, base: T | None = None) -> T:
    known = {f.name: f for f in fields(kind) if not _is_nested(f)}  # type: ignore[arg-type]
    checked: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            near = ", ".join(sorted(known))
            raise ConfigError(f"{where} {key}: unknown key", remedy=f"expected one of: {near}")
        expected = known[key].type
        if expected is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) < 2**63 else inf  # TOML's integers have 64 bits
        if not isinstance(expected, type) or type(value) is not expected:
            name = expected.__name__ if isinstance(expected, type) else str(expected)
            raise ConfigError(f"{where} {key}: expected {name}, got {_kind_of(value)}")
        if isinstance(value, float) and not isfinite(value):
            raise ConfigError(f"{where} {key}: expected a finite number, got {values[key]}")
        checked[key] = value
    try:
        return kind(**checked) if base is None else replace(base, **checked)  # type: ignore[type-var]
    except ValueError as error:
        raise ConfigError(f"{where} {error}") from None


def _is_nested(f: Any) -> bool:
    return f.default_factory is not MISSING and is_dataclass(f.default_factory)


def _kind_of(value: object) -> str:
    return f"{type(value).__name__} {value!r}"
