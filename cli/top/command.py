"""`pacekeeper top`: jobs, ranks and incidents, live; keys sort, filter, open and act."""

import os
import sys

import click

from pacekeeper.cli.common.options import Finite, asks_controller
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.core.errors import HostError

_INSTEAD = "use `pacekeeper status --watch`"


@click.command()
@asks_controller
@click.option("--job", default="", help="Begin with this job.")
@click.option(
    "--every", "period_s", type=Finite(min=0.2), default=1.0, show_default=True, help="Seconds."
)
def command(client: ClientConfig, job: str, period_s: float) -> None:
    """Watch jobs, ranks and incidents, live.

    Keys stand at the bottom. Acts (approve, cordon and the like) ask once more, and take the role
    operator.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise HostError("top is drawn on a terminal, and this is none", remedy=_INSTEAD)
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        raise HostError("this terminal can not be drawn on (TERM says dumb)", remedy=_INSTEAD)
    from pacekeeper.cli.top.app import TopApp
    from pacekeeper.cli.top.source import Source

    source = Source(client)
    source.look(job)  # who can not be reached is said before the screen is taken
    try:
        TopApp(source, job=job, period_s=period_s).run()
    finally:
        source.close()
