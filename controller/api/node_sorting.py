"""Order and summary of node messages, for the command line and the web page."""

from collections.abc import Iterable, Sequence
from typing import Any


def worst_first(nodes: Iterable[Any], *, with_well: bool) -> list[Any]:
    """Sort nodes: lemons, then most strikes, then newest strike, then by name.

    Args:
        nodes: Node messages.
        with_well: Whether to include nodes without strikes and cordons.
    """
    found = [one for one in nodes if with_well or one.strikes or one.HasField("cordon")]
    return sorted(
        found,
        key=lambda one: (
            not one.is_lemon,
            -len(one.strikes),
            -(one.strikes[0].unix_s if one.strikes else 0.0),
            one.name,
        ),
    )


def fleet_summary(nodes: Sequence[Any]) -> str:
    """One line with the numbers of nodes: disconnected, with strikes, cordoned."""
    disconnected = sum(not one.is_connected for one in nodes)
    struck = sum(bool(one.strikes) for one in nodes)
    lemons = sum(one.is_lemon for one in nodes)
    cordoned = sum(one.HasField("cordon") for one in nodes)
    return (
        f"{_counted(len(nodes), 'node')}: {disconnected:,} disconnected, "
        f"{_counted(lemons, 'lemon')}, {struck:,} with a slow device in the last 90 days, "
        f"{cordoned:,} cordoned"
    )


def strikes_by_device(node: Any) -> list[tuple[str, list[Any]]]:
    """Each device's strikes, newest first; the most struck device first."""
    found: dict[str, list[Any]] = {}
    for strike in node.strikes:
        found.setdefault(strike.device_uuid, []).append(strike)
    return sorted(found.items(), key=lambda one: -len(one[1]))


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
