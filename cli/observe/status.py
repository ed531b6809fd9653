"""`pacekeeper status`: jobs, ranks and nodes, for people or for programs."""

import json
import sys
import time
from typing import Any

import click

from pacekeeper.cli.common.options import asks_controller
from pacekeeper.cli.observe.proposal_text import proposal_lines
from pacekeeper.cli.operate.overrides import order_line
from pacekeeper.core.config.client import ClientConfig

WATCH_PERIOD_S = 1.0
FILE_WIDTH = 160  # columns where the output is no terminal
SLOW = 1.1  # worth a person's eye


@click.command()
@asks_controller
@click.option("--job", default="", help="Only this job.")
@click.option("--watch", is_flag=True, help="Again every second, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document (per line, if watched).")
def command(client: ClientConfig, job: str, watch: bool, as_json: bool) -> None:
    """Ask the controller for jobs, ranks and nodes."""
    from pacekeeper.cli.common.client import status_stub

    with status_stub(client) as stub:
        if not watch:
            _show(*_ask(stub, job), as_json=as_json)
            return
        try:
            while True:
                jobs, nodes = _ask(stub, job)
                if not as_json:
                    click.clear()  # does nothing where the output is no terminal
                _show(jobs, nodes, as_json=as_json)
                time.sleep(WATCH_PERIOD_S)
        except KeyboardInterrupt:
            return  # the way a watch is meant to end, wherever it was


def _ask(stub: Any, job: str) -> tuple[list[Any], list[Any]]:
    """Jobs and nodes; of one job only itself and its nodes."""
    from pacekeeper.cli.common.client import ask
    from pacekeeper.protos import status_pb2

    nodes = list(ask(stub.ListNodes, status_pb2.ListNodesRequest()).nodes)
    if not job:
        return list(ask(stub.ListJobs, status_pb2.ListJobsRequest()).jobs), nodes
    found = ask(stub.GetJob, status_pb2.GetJobRequest(job=job)).job
    names = {rank.node for rank in found.ranks}
    return [found], [node for node in nodes if node.name in names]


def _show(jobs: list[Any], nodes: list[Any], *, as_json: bool) -> None:
    from pacekeeper.protos.convert.json import message_to_dict

    if not as_json:
        _print(jobs, nodes)
        return
    document = {
        "jobs": [message_to_dict(j) for j in jobs],
        "nodes": [message_to_dict(n) for n in nodes],
    }
    click.echo(json.dumps(document))


def _print(jobs: list[Any], nodes: list[Any]) -> None:
    from rich.console import Console
    from rich.markup import escape

    is_terminal = sys.stdout.isatty()
    console = Console(width=None if is_terminal else FILE_WIDTH, highlight=False, soft_wrap=True)
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
            f"[bold]{escape(job.name)}[/]  {escape(job.watch)}  step {job.step}  "
            f"{job.tokens_per_s:,.0f} tokens/s{loss}  generation {job.generation}{moving}  "
            f"open incidents {job.open_incidents}  clock {escape(job.clock or '?')}"
        )
        if job.watch_reason:
            console.print(f"{escape(job.watch)}: {escape(job.watch_reason)}{_canary(job)}")
        if job.last_decision:
            console.print(f"[dim]{escape(job.last_decision)}[/]")
        for order in job.orders:
            console.print(f"[bold magenta]{escape(order_line(order))}[/]")
        if job.HasField("proposal"):
            for line in proposal_lines(job.proposal):
                console.print(f"[bold yellow]{escape(line)}[/]")
        if job.HasField("checkpoints"):
            console.print(_saves("checkpoints", job.checkpoints))
        if job.HasField("snapshots"):
            console.print(_saves("snapshots", job.snapshots))
        for line in job.advice:
            console.print(f"[yellow]advice:[/] {escape(line)}")
        if job.ranks:
            console.print(_rank_table(job))
        else:
            console.print("no rank known")
        console.print()
    if nodes:
        console.print(_node_table(nodes))


def _canary(job: Any) -> str:
    """The newest proof that the detector sees."""
    if not job.HasField("canary") or not job.canary.is_found:
        return ""  # none yet; or it was missed, which is the watch's reason
    canary = job.canary
    found = f"a canary of x{canary.slowdown:.2f} was found within {canary.num_steps} steps"
    return f"; {found} at step {canary.step}"


def _saves(name: str, saves: Any) -> str:
    """The newest complete one, and what holds the next one up."""
    from rich.markup import escape

    newest = "none complete yet"
    if saves.HasField("step"):
        done = "written" if name == "checkpoints" else "copied"
        newest = f"newest complete at step {saves.step}, {done} in {saves.duration_s:.1f} s"
    if not saves.trouble:
        return f"{name}: {newest}"
    return (
        f"[bold red]{name} {escape(saves.trouble)}:[/] {saves.missed} missed since step "
        f"{saves.since_step}: {escape(saves.reason)}; {newest}"
    )


def _rank_table(job: Any) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, header_style="dim")
    for name in ("rank", "node", "state", "slowdown", "observed ms", "expected ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("suspicion", "batch share", "replicas"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in job.ranks:
        is_measured = rank.HasField("slowdown")
        table.add_row(
            str(rank.rank),
            escape(rank.node),
            escape(rank.state) + (" cordoned" if rank.is_cordoned else ""),
            f"x{rank.slowdown:.2f}" if is_measured else "measuring",
            f"{rank.observed_s * 1e3:.0f}" if rank.HasField("observed_s") else "",
            f"{rank.expected_s * 1e3:.0f}" if rank.HasField("expected_s") else "",
            f"{rank.suspicion:.2f}",
            f"{rank.batch_share:.1%}",
            str(rank.num_expert_replicas),
            style=_style(rank),
        )
    return table


def _style(rank: Any) -> str:
    if rank.state == "dead" or (rank.HasField("slowdown") and rank.slowdown >= SLOW):
        return "bold red"
    return "yellow" if rank.state == "silent" else ""


def _node_table(nodes: list[Any]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, header_style="dim")
    for name in ("node", "agent", "rack", "version", "GPUs", "jobs", "lost", "corrupt", "dropped"):
        table.add_column(name, no_wrap=True)
    table.add_column("remarks")
    for node in nodes:
        remarks = [] if node.nvml == "ok" else [node.nvml]
        if node.history:
            times = f"{len(node.history)} times " if len(node.history) > 1 else ""
            lemon = "lemon: " if node.is_lemon else ""
            remarks.append(f"{lemon}slow {times}before: {node.history[0]}")
        table.add_row(
            escape(node.name),
            ("attached" if node.is_connected else "away")
            + (" cordoned" if node.HasField("cordon") else ""),
            escape(node.rack) or "-",
            escape(node.product_version),
            str(node.num_devices),
            escape(", ".join(node.jobs)),
            str(node.records_lost),
            str(node.records_corrupt),
            str(node.batches_dropped),
            escape("; ".join([*remarks, *node.unreadable])),
            style="" if node.is_connected else "yellow",
        )
    return table
