"""Text of `pacekeeper fleet`: the table of nodes and the history of one node."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from pacekeeper.controller.api.node_sorting import strikes_by_device

DAY_S = 86_400.0


def node_table(nodes: Sequence[Any], unix_s: float) -> Table:
    """Build the table with one row per node."""
    made = Table(box=None, header_style="dim")
    for name in ("node", "agent", "rack", "status"):
        made.add_column(name, no_wrap=True)
    for name in ("strikes", "devices", "jobs"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("last strike", no_wrap=True)
    made.add_column("running")
    for one in nodes:
        made.add_row(
            escape(one.name),
            "connected" if one.is_connected else "disconnected",
            escape(one.rack) or "-",
            node_status(one),
            str(len(one.strikes)),
            str(len({strike.device_uuid for strike in one.strikes})),
            str(len({strike.job for strike in one.strikes})),
            strike_text(one.strikes[0], unix_s) if one.strikes else "-",
            escape(", ".join(one.jobs)) or "-",
        )
    return made


def node_status(node: Any) -> str:
    """Return lemon, cordoned, struck or ok."""
    words = ["[bold red]lemon[/]"] if node.is_lemon else []
    if node.HasField("cordon"):
        words.append("[magenta]cordoned[/]")
    return " ".join(words) or ("struck" if node.strikes else "ok")


def strike_text(strike: Any, unix_s: float) -> str:
    """Return one strike without its device: kind, slowdown, job, age."""
    days = max(0.0, unix_s - strike.unix_s) / DAY_S
    return f"{strike.kind} x{strike.slowdown:.2f} in {escape(strike.job)}, {days:.1f} days ago"


def node_history(node: Any, unix_s: float) -> Group:
    """Return the strikes of one node by device, the device with most strikes first."""
    lines = [f"[bold]{escape(node.name)}[/]  {node_status(node)}"]
    if node.HasField("cordon"):
        order = node.cordon
        reason = f": {escape(order.reason)}" if order.reason else ""
        lines.append(f"cordoned by {escape(order.operator)}{reason}")
    if not node.strikes:
        lines.append("no slow device in the last 90 days")
    for device, strikes in strikes_by_device(node):
        times = f"{len(strikes)} times" if len(strikes) > 1 else "once"
        lines.append(f"{escape(device) or 'unnamed device'}: {times}")
        lines += [
            f"  {strike_text(strike, unix_s)} (incident {strike.incident_id})" for strike in strikes
        ]
    if node.is_lemon and not node.HasField("cordon"):
        lines.append(f"to remove its work: pacekeeper cordon {escape(node.name)}")
    return Group(*lines)
