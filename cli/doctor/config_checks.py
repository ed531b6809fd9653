"""`pacekeeper doctor --config FILE`: would who reads it start, and be of use? Nothing is started.

Each check asks the part that will use the setting, so that it says what that would say.
"""

import tomllib
from collections.abc import Iterator
from functools import partial

from pacekeeper.cli.common.settings import config_text, settings
from pacekeeper.cli.doctor import agent_checks, controller_checks
from pacekeeper.cli.doctor.checks import Check, Health, broken, tried
from pacekeeper.cli.doctor.file_checks import Look, reaches
from pacekeeper.core.config.agent import AgentConfig
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.loader import find_errors
from pacekeeper.core.errors import ConfigError

# Tables that one of them alone reads: who has none of these in a file does not run with it.
_OWN = {
    "controller": (
        "controller", "detector", "policy", "access", "limits", "webhook", "lease", "retention",
    ),
    "agent": ("agent",),
    "client": ("client",),
}  # fmt: skip


def check_config(config_file: str, whose: tuple[str, ...] = ()) -> tuple[Check, ...]:
    """The file itself and, where that is well, all that it names. `whose`: who reads it."""
    try:
        text = config_text(config_file)
    except ConfigError as error:
        return (broken("file", error),)
    if wrong := find_errors(text, file=config_file):
        return tuple(broken("file", error) for error in wrong)
    tables = tuple(tomllib.loads(text))
    readers = whose or readers_of(tables)
    known = ", ".join(f"[{table}]" for table in tables) or "no table: all as it comes"
    first = Check(name="file", health=Health.OK, found=f"{known}; read by {' and '.join(readers)}")
    is_both = "controller" in readers
    ours = settings(ControllerConfig, config_file).listen if is_both else ""
    return (first, *(check for reader in readers for check in _of(reader, config_file, ours)))


def readers_of(tables: tuple[str, ...]) -> tuple[str, ...]:
    """Those whose own tables these are; a controller, where they are nobody's."""
    found = tuple(reader for reader, own in _OWN.items() if set(own).intersection(tables))
    return found or ("controller",)


def _of(reader: str, config_file: str, ours: str) -> Iterator[Check]:
    looks: Iterator[Look]
    match reader:
        case "controller":
            looks = controller_checks.looks(settings(ControllerConfig, config_file))
        case "agent":
            looks = agent_checks.looks(settings(AgentConfig, config_file), ours)
        case _:
            client = settings(ClientConfig, config_file)
            looks = iter([("controller", partial(reaches, client, ours))])
    for name, look in looks:
        extra = "cli" if reader == "client" else reader
        yield tried(f"{reader}: {name}", look, extra=extra)
