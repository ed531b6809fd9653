"""The extras of the distribution (pyproject.toml), and which of them a missing package belongs to.

Called where a command or a check of `doctor` meets a package that is not installed. Needs the
standard library only, because it also runs where no extra is installed.
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution

from pacekeeper.core.errors import HostError

EXTRAS = ("agent", "controller", "cli", "trainer", "web", "plot")
# A line of metadata: `NAME[EXTRA,...]>=1; extra == 'OTHER'`.
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([^]]*)\])?[^;]*;\s*extra == ['\"]([\w-]+)['\"]")

# The extra that a command needs; those not listed need `cli`.
_OF_COMMAND = {
    "agent": "agent",
    "healthcheck": "agent",
    "backup": "controller",
    "controller": "controller",
    "launch": "trainer",
    "train": "trainer",
    "demo": "all",
}
# Packages of optional functions: no other extra than these (and `all`) brings them.
_OF_PACKAGE = {
    "jinja2": "web",
    "markupsafe": "web",
    "matplotlib": "plot",
    "pyarrow": "parquet",
    "starlette": "web",
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
    remedy = f"pip install 'pacekeeper[{extra}]'"
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
            f"not installed here: {', '.join(names)}", remedy="pip install 'pacekeeper[all]'"
        )


def missing_by_extra() -> dict[str, tuple[str, ...]]:
    """The distributions of each extra in EXTRAS that are not installed.

    Raises PackageNotFoundError where pacekeeper itself runs without being installed.
    """
    needed = _requirements(distribution("pacekeeper").requires or ())
    return {extra: tuple(filter(_is_missing, needed.get(extra, ()))) for extra in EXTRAS}


def _requirements(lines: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """Distributions by extra; those of an extra that another one includes are in both."""
    direct: dict[str, list[str]] = {}
    included: dict[str, list[str]] = {}
    for line in lines:
        if (found := _REQUIREMENT.match(line)) is None:
            continue
        name, extras, extra = found.groups()
        if name == "pacekeeper":
            included.setdefault(extra, []).extend(extras.split(","))
        else:
            direct.setdefault(extra, []).append(name)
    return {
        extra: tuple(
            name for part in (extra, *included.get(extra, ())) for name in direct.get(part, ())
        )
        for extra in {*direct, *included}
    }


def _is_missing(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return True
    return False
