"""`pacekeeper fleet [NODE]`: nodes by their history of slow devices, over all jobs."""

import json
import sys
import time

import click

from pacekeeper.cli.common.options import json_option, with_controller_options
from pacekeeper.core.config.client import ClientConfig

FILE_WIDTH = 160  # columns if the output is not a terminal


@click.command()
@with_controller_options
@click.argument("node", default="")
@click.option("--all", "with_well", is_flag=True, help="Also list nodes without findings.")
@json_option()
def command(client: ClientConfig, node: str, with_well: bool, as_json: bool) -> None:
    """List nodes with slow devices, repeat offenders (lemons) first; with NODE, its history."""
    from rich.console import Console

    from pacekeeper.cli.common.client import NotFoundError, call, status_stub
    from pacekeeper.cli.observe import fleet_text
    from pacekeeper.controller.api.node_sorting import fleet_summary, worst_first
    from pacekeeper.protos import status_pb2
    from pacekeeper.protos.convert.plain import message_to_dict

    with status_stub(client) as stub:
        nodes = list(call(stub.ListNodes, status_pb2.ListNodesRequest(include_removed=True)).nodes)
    if node:
        nodes = [one for one in nodes if one.name == node]
        if not nodes:
            raise NotFoundError(
                f"no node {node!r}", remedy="list all nodes with `pacekeeper fleet --all`"
            )
    found = worst_first(nodes, with_well=with_well or bool(node))
    if as_json:
        click.echo(json.dumps({"nodes": [message_to_dict(one) for one in found]}))
        return
    width = None if sys.stdout.isatty() else FILE_WIDTH
    console = Console(width=width, highlight=False, soft_wrap=True)
    if node:
        console.print(fleet_text.node_history(found[0], time.time()))
        return
    console.print(fleet_summary(nodes))
    if found:
        console.print(fleet_text.node_table(found, time.time()))
