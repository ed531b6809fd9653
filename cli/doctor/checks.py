"""Results of `pacekeeper doctor`: `Check` values, their exit code and their table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from pacekeeper.cli.common.extras import missing_package
from pacekeeper.core.errors import ExitCode, PacekeeperError

if TYPE_CHECKING:
    from rich.table import Table


class Health(StrEnum):
    """Result of a check."""

    OK = "ok"
    LIMITED = "limited"  # works, but something is missing or slow
    BROKEN = "broken"  # a part of pacekeeper cannot run


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check: finding, remedy if it is not ok, and exit code if it is broken."""

    name: str
    health: Health
    found: str
    remedy: str = ""
    exit_code: ExitCode = ExitCode.HOST


def run_check(name: str, check: Callable[[], "Check | str"], *, extra: str) -> Check:
    """Run one check and turn a failure with a remedy into a broken Check.

    Args:
        name: of the Check returned.
        check: returns a Check, or the finding if it is ok.
        extra: extra of the distribution to name if a package is missing.
    """
    try:
        found = check()
    except PacekeeperError as error:
        return failed_check(name, error)
    except ModuleNotFoundError as error:
        failure = missing_package(error, extra=extra)
        if failure is None:
            raise
        return failed_check(name, failure)
    if isinstance(found, Check):
        return replace(found, name=name)
    return Check(name=name, health=Health.OK, found=found)


def failed_check(name: str, error: PacekeeperError) -> Check:
    """Return the broken check for an error."""
    return Check(
        name=name,
        health=Health.BROKEN,
        found=error.what,
        remedy=error.remedy,
        exit_code=error.exit_code,
    )


def exit_code_of(checks: Sequence[Check]) -> ExitCode:
    """Return the highest exit code of the broken checks."""
    codes = [check.exit_code for check in checks if check.health is Health.BROKEN]
    return max(codes, default=ExitCode.OK)


def check_table(checks: Sequence[Check]) -> "Table":
    """Build the table with one row per check."""
    from rich.table import Table
    from rich.text import Text

    styles = {Health.OK: "green", Health.LIMITED: "yellow", Health.BROKEN: "bold red"}
    made = Table(box=None, header_style="dim")
    for name in ("", "check", "finding", "remedy"):
        made.add_column(name, overflow="fold")
    for check in checks:
        # Text: paths and messages of the system are not markup.
        words = (Text(word) for word in (check.name, check.found, check.remedy))
        made.add_row(Text(check.health, style=styles[check.health]), *words)
    return made
