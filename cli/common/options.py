"""Options that commands share, and kinds of options that click lacks."""

import functools
import math
from collections.abc import Callable
from typing import Any

import click

from pacekeeper.cli.common.settings import settings
from pacekeeper.core.config.client import ClientConfig


class Finite(click.FloatRange):
    """A number in a range, and neither nan nor infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """nan lies in no range, but click compares with `<`; infinity lies in an open one."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


def asks_controller(function: Callable[..., Any]) -> Callable[..., Any]:
    """For a command that asks a controller: its options, and `client`, what they come to."""

    @click.option("--controller", help=f"HOST:PORT of it [default: {ClientConfig().controller}].")
    @click.option(
        "--config",
        "config_file",
        envvar="PACEKEEPER_CONFIG",
        type=click.Path(dir_okay=False),
        help="TOML, [client] and [tls] (or the environment's PACEKEEPER_CONFIG).",
    )
    @functools.wraps(function)
    def command(*given: Any, config_file: str | None, controller: str | None, **rest: Any) -> Any:
        client = settings(ClientConfig, config_file, controller=controller)
        return function(*given, client=client, **rest)

    return command
