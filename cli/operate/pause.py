"""`pacekeeper pause JOB`: findings go on, no plans are made."""

import click

from pacekeeper.cli.common.options import asks_controller
from pacekeeper.core.config.client import ClientConfig


@click.command()
@asks_controller
@click.argument("subject", metavar="JOB")
@click.option("--reason", default="", help="Why; it is shown wherever the order is.")
@click.option("--by", default="", help="Who says so; by default you, as the system knows you.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(client: ClientConfig, subject: str, reason: str, by: str, as_json: bool) -> None:
    """Make no plans for a job until `pacekeeper resume`; what is on its way is taken back.

    Findings, causes and probes that are under way go on.
    """
    from pacekeeper.cli.operate.overrides import order, show
    from pacekeeper.core.incidents.operator_orders import OrderKind

    given = order(client, OrderKind.PAUSE, subject, is_on=True, said_by=by, reason=reason)
    show(given, is_on=True, as_json=as_json)
