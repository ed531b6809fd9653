"""`pacekeeper approve ID`: the word that a proposed plan waits for."""

import click

from pacekeeper.cli.common.options import asks_controller
from pacekeeper.core.config.client import ClientConfig


@click.command()
@asks_controller
@click.argument("proposal_id", type=click.IntRange(min=1), metavar="ID")
@click.option("--by", default="", help="Who says so; by default you, as the system knows you.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(client: ClientConfig, proposal_id: int, by: str, as_json: bool) -> None:
    """Approve the plan with this number (see `pacekeeper status`).

    It is priced again, and offered to the ranks if it still does what it was made for.
    """
    from pacekeeper.cli.operate.proposals import approve, show, who

    show(approve(client, proposal_id, by or who()), as_json=as_json)
