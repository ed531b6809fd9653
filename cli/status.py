"""`pacekeeper status`: jobs, ranks and nodes, for people or for programs."""

import json
import time
from typing import Any

import click

from pacekeeper.core.config import AgentConfig


@click.command()
@click.option("--controller", default=AgentConfig().controller, show_default=True)
@click.option("--job", default="", help="Only this job.")
@click.option("--watch", is_flag=True, help="Again every second, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document (per line, if watched).")
def command(controller: str, job: str, watch: bool, as_json: bool) -> None:
    """Ask the controller for jobs, ranks and nodes."""
    from pacekeeper.cli.client import as_dict, ask, status_stub
    from pacekeeper.protos import status_pb2

    with status_stub(controller) as stub:
        while True:
            if job:
                jobs = [ask(stub.GetJob, status_pb2.GetJobRequest(job=job)).job]
            else:
                jobs = list(ask(stub.ListJobs, status_pb2.ListJobsRequest()).jobs)
            nodes = list(ask(stub.ListNodes, status_pb2.ListNodesRequest()).nodes)
            if as_json:
                document = {
                    "jobs": [as_dict(j) for j in jobs],
                    "nodes": [as_dict(n) for n in nodes],
                }
                click.echo(json.dumps(document))
            else:
                _print(jobs, nodes)
            if not watch:
                return
            try:
                time.sleep(1.0)
            except KeyboardInterrupt:
                return


def _print(jobs: list[Any], nodes: list[Any]) -> None:
    from rich.console import Console

    console = Console()
    if not jobs:
        console.print("no jobs yet")
    for job in jobs:
        loss = f"  loss {job.loss:.3f}" if job.HasField("loss") else ""
        moving = (
            f" (moving to {job.desired_generation})"
            if job.desired_generation != job.generation
            else ""
        )
        console.print(
            f"[bold]{job.name}[/]  {job.watch}  step {job.step}  {job.tokens_per_s:,.0f} tokens/s"
            f"{loss}  generation {job.generation}{moving}  open incidents {job.open_incidents}",
            highlight=False,
        )
        if job.last_decision:
            console.print(f"[dim]{job.last_decision}[/]", highlight=False)
        console.print(_rank_table(job))
    if nodes:
        console.print(_node_table(nodes))


def _rank_table(job: Any) -> Any:
    from rich.table import Table

    table = Table(box=None, header_style="dim")
    for name in ("rank", "node", "state", "slowdown", "observed ms", "expected ms"):
        table.add_column(name, justify="right")
    for name in ("suspicion", "batch share", "expert replicas"):
        table.add_column(name, justify="right")
    for rank in job.ranks:
        measured = rank.HasField("slowdown")
        slow = measured and rank.slowdown >= 1.1
        table.add_row(
            str(rank.rank),
            rank.node,
            rank.state,
            f"x{rank.slowdown:.2f}" if measured else "measuring",
            f"{rank.observed_s * 1e3:.0f}" if rank.HasField("observed_s") else "",
            f"{rank.expected_s * 1e3:.0f}" if rank.HasField("expected_s") else "",
            f"{rank.suspicion:.2f}",
            f"{rank.batch_share:.1%}",
            str(rank.num_expert_replicas),
            style="bold red" if rank.state == "dead" or slow else "",
        )
    return table


def _node_table(nodes: list[Any]) -> Any:
    from rich.table import Table

    table = Table(box=None, header_style="dim")
    for name in ("node", "agent", "version", "GPUs", "jobs", "lost", "corrupt", "remarks"):
        table.add_column(name)
    for node in nodes:
        remarks = [] if node.nvml == "ok" else [node.nvml]
        table.add_row(
            node.name,
            "attached" if node.is_connected else "away",
            node.product_version,
            str(node.num_devices),
            ", ".join(node.jobs),
            str(node.records_lost),
            str(node.records_corrupt),
            "; ".join([*remarks, *node.unreadable]),
            style="" if node.is_connected else "yellow",
        )
    return table
