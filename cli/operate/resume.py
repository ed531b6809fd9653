"""`pacekeeper resume JOB`: plans are made again."""

import click

from pacekeeper.cli.common.options import asks_controller
from pacekeeper.core.config.client import ClientConfig


@click.command()
@asks_controller
@click.argument("subject", metavar="JOB")
@click.option("--by", default="", help="Who says so; by default you, as the system knows you.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(client: ClientConfig, subject: str, by: str, as_json: bool) -> None:
    """Make plans for a paused job again."""
    from pacekeeper.cli.operate.overrides import order, show
    from pacekeeper.core.incidents.operator_orders import OrderKind

    given = order(client, OrderKind.PAUSE, subject, is_on=False, said_by=by)
    show(given, is_on=False, as_json=as_json)
