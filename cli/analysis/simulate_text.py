"""What `pacekeeper simulate` prints for people: two tables."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pacekeeper.simulator.engine.event_loop import Outcome
from pacekeeper.simulator.engine.statistics import Summary, told_with
from pacekeeper.simulator.policies.base import Use
from pacekeeper.simulator.scenario.loader import Scenario

HEADS = ("policy", "samples/s", "of the first", "of the limit", "restarts", "regrouped", "copied")
UNITS = ((2.0 * 86400.0, 86400.0, "days"), (7200.0, 3600.0, "hours"), (0.0, 60.0, "minutes"))


def print_table(
    known: Scenario, found: Mapping[str, Sequence[Outcome]], rows: Sequence[Summary]
) -> None:
    """Rates and restarts; below it, where the time went."""
    console = Console()
    table = Table(title=escape(title_of(known, found)), padding=0)  # 80 columns hold it
    table.add_column(HEADS[0], overflow="fold")
    for head in HEADS[1:]:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*map(escape, cells_of(row)))
    console.print(table)
    spent = Table(title="where the time went")
    for head in ("", *(escape(row.policy) for row in rows)):
        spent.add_column(head, justify="right" if head else "left")
    for use in uses_of(rows):
        spent.add_row(str(use), *(part_of(row.spent[use]) for row in rows))
    console.print(spent)


def title_of(known: Scenario, found: Mapping[str, Sequence[Outcome]]) -> str:
    """Name, length and seeds."""
    outcomes = next(iter(found.values()))
    unit_s, unit = unit_of(outcomes[0].duration_s)
    seeds = "1 seed" if len(outcomes) == 1 else f"{len(outcomes)} seeds"
    return f"{known.name}: {outcomes[0].duration_s / unit_s:.1f} {unit}, {seeds}"


def unit_of(duration_s: float) -> tuple[float, str]:
    """Seconds and name of the unit in which such a time reads well."""
    return next((unit_s, name) for least_s, unit_s, name in UNITS if duration_s >= least_s)


def uses_of(rows: Sequence[Summary]) -> list[Use]:
    """Those that any policy spent time on."""
    return [use for use in Use if any(part_of(row.spent[use]) for row in rows)]


def part_of(part: float) -> str:
    """A part of the time; nothing for what rounds to nothing."""
    return f"{part:.2%}" if part >= 5e-5 else ""


def cells_of(row: Summary) -> tuple[str, ...]:
    """In the order of HEADS, means of all seeds. Restarts that a living copy made needless are
    told.
    """
    of_seed = row.needless_restarts / row.num_seeds
    needless = f" ({of_seed:.1f} needless)" if row.needless_restarts else ""
    return (
        row.policy,
        told_with(row.samples_per_s_95, row.samples_per_s, ".1f"),
        told_with(row.ratio_95, row.ratio, ".2f"),
        told_with(row.fluid_95, row.fluid, ".1%"),
        f"{row.restarts:.1f}{needless}",
        f"{row.reconfigurations:.1f}",
        f"{row.copied_bytes / 1e9:.0f} GB",
    )
