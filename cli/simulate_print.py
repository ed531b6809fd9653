"""What `pacekeeper simulate` prints for people: two tables."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from pacekeeper.simulator.scenario import Scenario
from pacekeeper.simulator.sim_policy import Use
from pacekeeper.simulator.sim_summary import Summary
from pacekeeper.simulator.simulate import Outcome

HEADS = ("policy", "samples/s", "of the first", "restarts", "reconfigured")


def print_table(
    known: Scenario, found: Mapping[str, Sequence[Outcome]], rows: Sequence[Summary]
) -> None:
    """Rates and restarts; below it, where the time went."""
    console = Console()
    table = Table(title=title_of(known, found))
    for head in HEADS:
        table.add_column(head, justify="left" if head == "policy" else "right")
    for row in rows:
        table.add_row(*cells_of(row))
    console.print(table)
    spent = Table(title="where the time went")
    for head in ("", *(row.policy for row in rows)):
        spent.add_column(head, justify="right" if head else "left")
    for use in Use:
        spent.add_row(str(use), *(f"{row.spent[use]:.1%}" for row in rows))
    console.print(spent)


def title_of(known: Scenario, found: Mapping[str, Sequence[Outcome]]) -> str:
    """Name, length and seeds."""
    outcomes = next(iter(found.values()))
    hours = outcomes[0].duration_s / 3600.0
    return f"{known.name}: {hours:.1f} h, {len(outcomes)} seeds"


def cells_of(row: Summary) -> tuple[str, ...]:
    """In the order of HEADS. Restarts that a living copy made needless are told."""
    needless = f" ({row.needless_restarts} needless)" if row.needless_restarts else ""
    return (
        row.policy,
        f"{row.samples_per_s:.1f} +- {row.samples_per_s_95:.1f}",
        f"{row.ratio:.2f} +- {row.ratio_95:.2f}",
        f"{row.restarts:.1f}{needless}",
        f"{row.reconfigurations:.1f}",
    )
