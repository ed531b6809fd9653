"""`pacekeeper deny ID`: a proposed plan is not wanted, nor others of its kind for a while."""

import click

from pacekeeper.cli.common.options import asks_controller
from pacekeeper.core.config.client import ClientConfig


@click.command()
@asks_controller
@click.argument("proposal_id", type=click.IntRange(min=1), metavar="ID")
@click.option("--reason", default="", help="Why; it is shown wherever the plan is.")
@click.option("--by", default="", help="Who says so; by default you, as the system knows you.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(client: ClientConfig, proposal_id: int, reason: str, by: str, as_json: bool) -> None:
    """Deny the plan with this number (see `pacekeeper status`); its kind waits."""
    from pacekeeper.cli.operate.proposals import deny, show, who

    show(deny(client, proposal_id, by or who(), reason), as_json=as_json)
