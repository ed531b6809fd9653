"""`pacekeeper dry-run on|off`: plans are made and told, and none is offered, of any job."""

import click

from pacekeeper.cli.common.options import asks_controller
from pacekeeper.core.config.client import ClientConfig


@click.command()
@asks_controller
@click.argument("state", type=click.Choice(["on", "off"]))
@click.option("--reason", default="", help="Why; it is shown wherever the order is.")
@click.option("--by", default="", help="Who says so; by default you, as the system knows you.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(client: ClientConfig, state: str, reason: str, by: str, as_json: bool) -> None:
    """Make plans and tell them, and offer none, until it is switched off."""
    from pacekeeper.cli.operate.overrides import order, show
    from pacekeeper.core.incidents.operator_orders import OrderKind

    is_on = state == "on"
    given = order(client, OrderKind.DRY_RUN, "", is_on=is_on, said_by=by, reason=reason)
    show(given, is_on=is_on, as_json=as_json)
