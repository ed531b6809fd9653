"""Options that several commands share, and parameter types that click lacks."""

import functools
import math
from collections.abc import Callable
from typing import Any

import click

from pacekeeper.cli.common.settings import load_settings
from pacekeeper.core.config.client import ClientConfig


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
        type=click.Path(dir_okay=False),
        help="TOML file with [client] and [tls] [env: PACEKEEPER_CONFIG].",
    )
    @functools.wraps(function)
    def command(
        *positional: Any, config_file: str | None, controller: str | None, **rest: Any
    ) -> Any:
        client = load_settings(ClientConfig, config_file, controller=controller)
        return function(*positional, client=client, **rest)

    return command


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
