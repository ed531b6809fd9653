"""`pacekeeper status`: jobs with their ranks, orders and checkpoints, and nodes."""

import json
import sys
import time
from typing import Any

import click

from pacekeeper.cli.common.options import json_option, with_controller_options
from pacekeeper.cli.observe.operator_text import order_line, proposal_lines
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.core.text import format_s

WATCH_PERIOD_S = 1.0
FILE_WIDTH = 160  # columns if the output is not a terminal
SLOW = 1.1  # shown in red


@click.command()
@with_controller_options
@click.option("--job", default="", help="Show this job only.")
@click.option("--watch", is_flag=True, help="Refresh every second until Ctrl-C.")
@json_option("Print one JSON document (with --watch one per line).")
def command(client: ClientConfig, job: str, watch: bool, as_json: bool) -> None:
    """Show jobs, ranks and nodes as the controller knows them."""
    from pacekeeper.cli.common.client import status_stub

    with status_stub(client) as stub:
        if not watch:
            _show(*_query(stub, job), as_json=as_json)
            return
        try:
            while True:
                jobs, nodes = _query(stub, job)
                if not as_json:
                    click.clear()  # does nothing where the output is no terminal
                _show(jobs, nodes, as_json=as_json)
                time.sleep(WATCH_PERIOD_S)
        except KeyboardInterrupt:
            return


def _query(stub: Any, job: str) -> tuple[list[Any], list[Any]]:
    """Query all jobs and nodes, or one job and its nodes."""
    from pacekeeper.cli.common.client import call
    from pacekeeper.protos import status_pb2

    nodes = list(call(stub.ListNodes, status_pb2.ListNodesRequest()).nodes)
    if not job:
        return list(call(stub.ListJobs, status_pb2.ListJobsRequest()).jobs), nodes
    found = call(stub.GetJob, status_pb2.GetJobRequest(job=job)).job
    names = {rank.node for rank in found.ranks}
    return [found], [node for node in nodes if node.name in names]


def _show(jobs: list[Any], nodes: list[Any], *, as_json: bool) -> None:
    from pacekeeper.protos.convert.plain import message_to_dict

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
        console.print("no jobs")
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
        if job.iteration:
            console.print(f"[dim]iteration: {escape(job.iteration)}[/]")
        for line in job.advice:
            console.print(f"[yellow]advice:[/] {escape(line)}")
        if job.ranks:
            console.print(_rank_table(job))
        else:
            console.print("no ranks")
        console.print()
    if nodes:
        console.print(_node_table(nodes))


def _canary(job: Any) -> str:
    """Return the result of the last canary, if it was detected."""
    if not job.HasField("canary") or not job.canary.is_found:
        return ""  # none yet; a missed canary is in the watch reason
    canary = job.canary
    return (
        f"; canary of x{canary.slowdown:.2f} detected within {canary.num_steps} steps "
        f"at step {canary.step}"
    )


def _saves(name: str, saves: Any) -> str:
    """Return the newest complete checkpoint or snapshot, and what delays the next."""
    from rich.markup import escape

    newest = "none complete"
    if saves.HasField("step"):
        done = "written" if name == "checkpoints" else "copied"
        newest = f"newest complete at step {saves.step}, {done} in {format_s(saves.duration_s)}"
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
    for name in ("rank", "node", "state", "slowdown", "observed", "expected"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("suspicion", "batch share", "replicas"):
        table.add_column(name, justify="right", no_wrap=True)
    has_places = any(rank.place for rank in job.ranks)
    if has_places:
        table.add_column("place")
    for rank in job.ranks:
        is_measured = rank.HasField("slowdown")
        table.add_row(
            str(rank.rank),
            escape(rank.node),
            escape(rank.state) + (" cordoned" if rank.is_cordoned else ""),
            f"x{rank.slowdown:.2f}" if is_measured else "measuring",
            format_s(rank.observed_s) if rank.HasField("observed_s") else "",
            format_s(rank.expected_s) if rank.HasField("expected_s") else "",
            f"{rank.suspicion:.2f}",
            f"{rank.batch_share:.1%}",
            str(rank.num_expert_replicas),
            *([rank.place] if has_places else []),
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
            times = f"{len(node.history)} times " if len(node.history) > 1 else "once "
            lemon = "lemon, " if node.is_lemon else ""
            remarks.append(f"{lemon}found slow {times}before; last: {node.history[0]}")
        table.add_row(
            escape(node.name),
            ("connected" if node.is_connected else "disconnected")
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
