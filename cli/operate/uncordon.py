"""`pacekeeper uncordon NODE|JOB/RANK`: work for it again."""

import click

from pacekeeper.cli.common.options import asks_controller
from pacekeeper.core.config.client import ClientConfig


@click.command()
@asks_controller
@click.argument("subject", metavar="NODE|JOB/RANK")
@click.option("--by", default="", help="Who says so; by default you, as the system knows you.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(client: ClientConfig, subject: str, by: str, as_json: bool) -> None:
    """Take the cordon of a node, or of one rank of a job, back."""
    from pacekeeper.cli.operate.overrides import cordon, show

    show(cordon(client, subject, is_on=False, said_by=by), is_on=False, as_json=as_json)
