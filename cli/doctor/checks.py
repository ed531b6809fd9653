"""One thing that `pacekeeper doctor` looked at: how well it is, and what to do where it is not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from pacekeeper.cli.common.extras import missing_package
from pacekeeper.core.errors import ExitCode, PacekeeperError

if TYPE_CHECKING:
    from rich.table import Table


class Health(StrEnum):
    OK = "ok"
    LIMITED = "limited"  # works, but something is missing or slow
    BROKEN = "broken"  # a part of pacekeeper can not run here


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing looked at: what was found and, where it is not well, what to do.

    `exit_code`: how the command ends where this is broken.
    """

    name: str
    health: Health
    found: str
    remedy: str = ""
    exit_code: ExitCode = ExitCode.HOST


def tried(name: str, look: Callable[[], "Check | str"], *, extra: str) -> Check:
    """Run one check and turn a failure with a remedy into a broken Check.

    Args:
        name: of the Check returned.
        look: the check; returns a Check, or what it found where all is well.
        extra: the extra to name where a package is missing.
    """
    try:
        found = look()
    except PacekeeperError as error:
        return broken(name, error)
    except ModuleNotFoundError as error:
        failure = missing_package(error, extra=extra)
        if failure is None:
            raise
        return broken(name, failure)
    if isinstance(found, Check):
        return replace(found, name=name)
    return Check(name=name, health=Health.OK, found=found)


def broken(name: str, error: PacekeeperError) -> Check:
    """What was raised of it."""
    return Check(
        name=name,
        health=Health.BROKEN,
        found=error.what,
        remedy=error.remedy,
        exit_code=error.exit_code,
    )


def worst(checks: Sequence[Check]) -> ExitCode:
    """How a command ends that has made these: the highest code of what is broken."""
    codes = [check.exit_code for check in checks if check.health is Health.BROKEN]
    return max(codes, default=ExitCode.OK)


def table(checks: Sequence[Check]) -> "Table":
    """A row for each check."""
    from rich.table import Table
    from rich.text import Text

    styles = {Health.OK: "green", Health.LIMITED: "yellow", Health.BROKEN: "bold red"}
    made = Table(box=None, header_style="dim")
    for name in ("", "what", "found", "to do"):
        made.add_column(name, overflow="fold")
    for check in checks:
        # Text: paths and what the system says are no markup.
        words = (Text(word) for word in (check.name, check.found, check.remedy))
        made.add_row(Text(check.health, style=styles[check.health]), *words)
    return made
