"""Options that several commands share, and parameter types that click lacks."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import click

from pacekeeper.cli.common.paths import PathType
from pacekeeper.cli.common.settings import load_settings
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.core.config.loader import override

Option = Callable[[Callable[..., Any]], Callable[..., Any]]


RECORD_ID = click.IntRange(1, 2**63 - 1)  # of an incident or a proposal, as stores number them


class FiniteFloatRange(click.FloatRange):
    """A number in a range; NaN and infinity are rejected."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert and check; click's range accepts NaN, and infinity where it is open."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


def with_controller_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --controller and --config to a command and pass the settings as `client`."""

    @click.option(
        "--controller", help=f"HOST:PORT of the controller [default: {ClientConfig().controller}]."
    )
    @click.option(
        "--config",
        "config_file",
        envvar="PACEKEEPER_CONFIG",
        type=PathType(dir_okay=False),
        help="TOML file with [client] and [tls] [env: PACEKEEPER_CONFIG].",
    )
    @functools.wraps(function)
    def command(
        *positional: Any, config_file: str | None, controller: str | None, **rest: Any
    ) -> Any:
        client = load_settings(ClientConfig, config_file, controller=controller)
        return function(*positional, client=client, **rest)

    return command


def settings_options(kind: type[Any], config_help: str, *options: Option) -> Option:
    """Add --config and options that override single settings; pass the settings as `config`.

    Args:
        kind: the settings class, for example `AgentConfig`.
        config_help: help of --config.
        options: results of `click.option`, in the order of the help; each is named after the
            setting that it overrides, SECTION__KEY for one of a section.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(*, config_file: str | None, **given: Any) -> Any:
            config = load_settings(
                kind, config_file, **{k: v for k, v in given.items() if "__" not in k}
            )
            for name in (k for k in given if "__" in k):
                section, _, key = name.partition("__")
                part = override(getattr(config, section), **{key: given[name]})
                config = replace(config, **{section: part})
            return function(config=config)

        config_option = click.option(
            "--config", "config_file", type=PathType(dir_okay=False), help=config_help
        )
        return _decorated(command, (config_option, *options))

    return decorate


def option_group(parameter: str, kind: type[Any], *options: Option) -> Option:
    """Add options to a command and pass them as one value.

    Args:
        parameter: name of the command's parameter.
        kind: dataclass whose fields are the names of the options.
        options: results of `click.option`, in the order of the help.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(*positional: Any, **values: Any) -> Any:
            group = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
            return function(*positional, **{parameter: group}, **values)

        return _decorated(command, options)

    return decorate


def _decorated(function: Callable[..., Any], options: Sequence[Option]) -> Callable[..., Any]:
    for option in reversed(options):
        function = option(function)
    return function


def json_option(text: str = "Print one JSON document.") -> Callable[..., Any]:
    """The option --json of a command, passed as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=text)


def by_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """The option --by of a command that an operator gives."""
    text = "Name of the operator in the audit log [default: USER@HOST of this process]."
    return click.option("--by", default="", help=text)(function)


def reason_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """The option --reason of a command that an operator gives."""
    text = "Reason; it is shown wherever the order or proposal is listed."
    return click.option("--reason", default="", help=text)(function)
