"""`pacekeeper top`: check the terminal and the controller, then start the screen."""

import os
import sys

import click

from pacekeeper.cli.common.options import FiniteFloatRange, with_controller_options
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.core.errors import HostError

_INSTEAD = "use `pacekeeper status --watch`"


@click.command()
@with_controller_options
@click.option("--job", default="", help="Show this job first.")
@click.option(
    "--every",
    "period_s",
    type=FiniteFloatRange(min=0.2),
    default=1.0,
    show_default=True,
    help="Seconds between refreshes.",
)
def command(client: ClientConfig, job: str, period_s: float) -> None:
    """Watch jobs, ranks and incidents on a live screen.

    The bottom line lists the keys. Acts such as approve and cordon ask for confirmation and need
    the role operator.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise HostError("standard input or output is not a terminal", remedy=_INSTEAD)
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        raise HostError("the terminal has no cursor control (TERM is dumb)", remedy=_INSTEAD)
    from pacekeeper.cli.top.app import TopApp
    from pacekeeper.cli.top.source import ControllerSource

    source = ControllerSource(client)
    source.fetch(job)  # an unreachable controller is reported before the screen opens
    try:
        TopApp(source, job=job, period_s=period_s).run()
    finally:
        source.close()
