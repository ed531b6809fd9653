"""The extras of the distribution (pyproject.toml), and which of them a missing package belongs to.

Called where a command or a check of `doctor` meets a package that is not installed. Needs the
standard library only, because it also runs where no extra is installed.
"""

import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution

from pacekeeper.core.errors import HostError

EXTRAS = ("agent", "controller", "cli", "trainer", "web", "plot")
# A line of metadata: `NAME>=1; extra == 'EXTRA'`. The build expands extras that include others.
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)[^;]*;\s*extra == ['\"](?P<extra>[\w-]+)['\"]")

# The extra that a command needs; those not listed need `cli`.
_OF_COMMAND = {
    "agent": "agent",
    "healthcheck": "agent",
    "controller": "controller",
    "data": "trainer",
    "launch": "trainer",
    "run": "trainer",
    "store": "controller",
    "demo": "all",
}
# Packages of optional functions: no other extra than these (and `all`) brings them.
_OF_PACKAGE = {
    "jinja2": "web",
    "markupsafe": "web",
    "matplotlib": "plot",
    "pyarrow": "parquet",
    "starlette": "web",
    "tokenizers": "trainer",
    "torch": "trainer",
    "uvicorn": "web",
}


def extra_of(words: Sequence[str]) -> str:
    """The extra that the command in the words after `pacekeeper` needs; `cli` without a command."""
    name = next((word for word in words if not word.startswith("-")), "")
    return _OF_COMMAND.get(name, "cli")


def missing_package(error: ModuleNotFoundError, *, extra: str) -> HostError | None:
    """The failure to report for a package that is not installed.

    Args:
        error: raised by the import.
        extra: what the caller as a whole needs; named unless the package belongs to another extra.

    Returns:
        A HostError that names the package and the extra to install; None where the missing module
        is Python's or pacekeeper's own: installing an extra would not help.
    """
    package = (error.name or "").partition(".")[0]
    if package in ("", "pacekeeper") or package in sys.stdlib_module_names:
        return None
    if extra != "all":
        extra = _OF_PACKAGE.get(package, extra)
    remedy = f"run `pip install 'pacekeeper[{extra}]'`"
    if package == "torch":
        remedy = f"install the torch build for this machine, or {remedy}"
    return HostError(f"the package {package} is not installed here", remedy=remedy)


def require(*extras: str) -> None:
    """Raise HostError unless all distributions of these extras are installed.

    For a command that would meet a missing package only after minutes of work.
    """
    try:
        missing = missing_by_extra()
    except PackageNotFoundError:
        return
    if names := sorted({name for extra in extras for name in missing[extra]}):
        raise HostError(
            f"packages are not installed here: {', '.join(names)}",
            remedy="run `pip install 'pacekeeper[all]'`",
        )


def missing_by_extra() -> dict[str, tuple[str, ...]]:
    """The distributions of each extra in EXTRAS that are not installed.

    Raises PackageNotFoundError where pacekeeper itself runs without being installed.
    """
    missing: dict[str, list[str]] = {extra: [] for extra in EXTRAS}
    for line in distribution("pacekeeper").requires or ():
        found = _REQUIREMENT.match(line)
        if found is not None and found["extra"] in missing and _is_missing(found["name"]):
            missing[found["extra"]].append(found["name"])
    return {extra: tuple(names) for extra, names in missing.items()}


def _is_missing(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return True
    return False
