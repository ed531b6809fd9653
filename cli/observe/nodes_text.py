"""What `pacekeeper fleet` prints of each node."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from pacekeeper.controller.api.node_sorting import strikes_by_device

DAY_S = 86_400.0


def table(nodes: Sequence[Any], unix_s: float) -> Table:
    """A line for each node."""
    made = Table(box=None, header_style="dim")
    for name in ("node", "agent", "rack", "verdict"):
        made.add_column(name, no_wrap=True)
    for name in ("strikes", "devices", "jobs"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("newest", no_wrap=True)
    made.add_column("now runs")
    for one in nodes:
        made.add_row(
            escape(one.name),
            "attached" if one.is_connected else "away",
            escape(one.rack) or "-",
            verdict(one),
            str(len(one.strikes)),
            str(len({strike.device_uuid for strike in one.strikes})),
            str(len({strike.job for strike in one.strikes})),
            told(one.strikes[0], unix_s) if one.strikes else "-",
            escape(", ".join(one.jobs)) or "-",
        )
    return made


def verdict(node: Any) -> str:
    """In a word or two, for people."""
    words = ["[bold red]lemon[/]"] if node.is_lemon else []
    if node.HasField("cordon"):
        words.append("[magenta]cordoned[/]")
    return " ".join(words) or ("struck" if node.strikes else "well")


def told(strike: Any, unix_s: float) -> str:
    """One strike, without its device."""
    days = max(0.0, unix_s - strike.unix_s) / DAY_S
    return f"{strike.kind} x{strike.slowdown:.2f} in {escape(strike.job)}, {days:.1f} days ago"


def past(node: Any, unix_s: float) -> Group:
    """All that is remembered of one node, device by device, the most struck first."""
    lines = [f"[bold]{escape(node.name)}[/]  {verdict(node)}"]
    if node.HasField("cordon"):
        order = node.cordon
        why = f": {escape(order.reason)}" if order.reason else ""
        lines.append(f"cordoned by {escape(order.said_by)}{why}")
    if not node.strikes:
        lines.append("nothing was found of its devices in the last 90 days")
    for device, strikes in strikes_by_device(node):
        times = f"{len(strikes)} times" if len(strikes) > 1 else "once"
        lines.append(f"{escape(device) or 'a device that its ranks did not name'}: {times}")
        lines += [f"  {told(strike, unix_s)} (incident {strike.incident_id})" for strike in strikes]
    if node.is_lemon and not node.HasField("cordon"):
        lines.append(f"to take the work from it: pacekeeper cordon {escape(node.name)}")
    return Group(*lines)
