"""`pacekeeper cordon NODE|JOB/RANK`: no work for it, by a person's word."""

import click

from pacekeeper.cli.common.options import asks_controller
from pacekeeper.core.config.client import ClientConfig


@click.command()
@asks_controller
@click.argument("subject", metavar="NODE|JOB/RANK")
@click.option("--reason", default="", help="Why; it is shown wherever the order is.")
@click.option("--by", default="", help="Who says so; by default you, as the system knows you.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(client: ClientConfig, subject: str, reason: str, by: str, as_json: bool) -> None:
    """Take the work from a node, or from one rank of a job.

    No plan gives it more, and as soon as the policy may it is left out; it comes back with
    `pacekeeper uncordon`. Training goes on all the while.
    """
    from pacekeeper.cli.operate.overrides import cordon, show

    given = cordon(client, subject, is_on=True, said_by=by, reason=reason)
    show(given, is_on=True, as_json=as_json)
