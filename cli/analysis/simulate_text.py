"""Text of `pacekeeper simulate`: a table of goodput and one of the use of time."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pacekeeper.simulator.engine.event_loop import SimulationResult
from pacekeeper.simulator.engine.statistics import Summary, with_interval
from pacekeeper.simulator.policies.base import Use
from pacekeeper.simulator.scenario.loader import Scenario

COLUMNS = ("policy", "samples/s", "vs first", "of limit", "restarts", "regrouped", "copied")
UNITS = ((2.0 * 86400.0, 86400.0, "days"), (7200.0, 3600.0, "hours"), (0.0, 60.0, "minutes"))


def print_table(
    known: Scenario, found: Mapping[str, Sequence[SimulationResult]], rows: Sequence[Summary]
) -> None:
    """Print the tables of goodput and use of time."""
    console = Console()
    table = Table(title=escape(simulation_title(known, found)), padding=0)  # 80 columns hold it
    table.add_column(COLUMNS[0], overflow="fold")
    for head in COLUMNS[1:]:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*map(escape, summary_cells(row)))
    console.print(table)
    spent = Table(title="use of time")
    for head in ("", *(escape(row.policy) for row in rows)):
        spent.add_column(head, justify="right" if head else "left")
    for use in shown_uses(rows):
        spent.add_row(str(use), *(share_text(row.spent[use]) for row in rows))
    console.print(spent)


def simulation_title(known: Scenario, found: Mapping[str, Sequence[SimulationResult]]) -> str:
    """Return name, duration and number of seeds."""
    outcomes = next(iter(found.values()))
    unit_s, unit = time_unit(outcomes[0].duration_s)
    seeds = "1 seed" if len(outcomes) == 1 else f"{len(outcomes)} seeds"
    return f"{known.name}: {outcomes[0].duration_s / unit_s:.1f} {unit}, {seeds}"


def time_unit(duration_s: float) -> tuple[float, str]:
    """Return seconds and name of the unit suited to a duration."""
    return next((unit_s, name) for least_s, unit_s, name in UNITS if duration_s >= least_s)


def shown_uses(rows: Sequence[Summary]) -> list[Use]:
    """Return the uses on which any policy spent time."""
    return [use for use in Use if any(share_text(row.spent[use]) for row in rows)]


def share_text(part: float) -> str:
    """Format a share of time; empty if it rounds to zero."""
    return f"{part:.2%}" if part >= 5e-5 else ""


def summary_cells(row: Summary) -> tuple[str, ...]:
    """Return the means of all seeds in the order of COLUMNS.

    Restarts are marked needless if live replicas held all state.
    """
    of_seed = row.needless_restarts / row.num_seeds
    needless = f" ({of_seed:.1f} needless)" if row.needless_restarts else ""
    return (
        row.policy,
        with_interval(row.samples_per_s_95, row.samples_per_s, ".1f"),
        with_interval(row.ratio_95, row.ratio, ".2f"),
        with_interval(row.fluid_95, row.fluid, ".1%"),
        f"{row.restarts:.1f}{needless}",
        f"{row.reconfigurations:.1f}",
        f"{row.copied_bytes / 1e9:.0f} GB",
    )
