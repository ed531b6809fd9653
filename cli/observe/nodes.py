"""`pacekeeper fleet [NODE]`: nodes and devices by what was found of them, over all jobs."""

import json
import sys
import time

import click

from pacekeeper.cli.common.options import asks_controller
from pacekeeper.core.config.client import ClientConfig

FILE_WIDTH = 160  # columns where the output is no terminal


@click.command()
@asks_controller
@click.argument("node", default="")
@click.option("--all", "with_well", is_flag=True, help="Also nodes of which nothing was found.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(client: ClientConfig, node: str, with_well: bool, as_json: bool) -> None:
    """Ask which nodes were found slow again and again, lemons first; of NODE, its devices' past."""
    from rich.console import Console

    from pacekeeper.cli.common.client import NotFoundError, ask, status_stub
    from pacekeeper.cli.observe import nodes_text
    from pacekeeper.controller.api.node_sorting import fleet_summary, worst_first
    from pacekeeper.protos import status_pb2
    from pacekeeper.protos.convert.json import message_to_dict

    with status_stub(client) as stub:
        nodes = list(ask(stub.ListNodes, status_pb2.ListNodesRequest(include_removed=True)).nodes)
    if node:
        nodes = [one for one in nodes if one.name == node]
        if not nodes:
            raise NotFoundError(f"no node {node} is known", remedy="see `pacekeeper fleet --all`")
    found = worst_first(nodes, with_well=with_well or bool(node))
    if as_json:
        click.echo(json.dumps({"nodes": [message_to_dict(one) for one in found]}))
        return
    width = None if sys.stdout.isatty() else FILE_WIDTH
    console = Console(width=width, highlight=False, soft_wrap=True)
    if node:
        console.print(nodes_text.past(found[0], time.time()))
        return
    console.print(fleet_summary(nodes))
    if found:
        console.print(nodes_text.table(found, time.time()))
