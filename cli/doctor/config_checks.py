"""`pacekeeper doctor --config FILE`: would the service that reads the file start and work?

Each check calls the code that uses the setting, so that it reports the same error.
"""

import tomllib
from collections.abc import Iterator
from functools import partial

from pacekeeper.cli.common.settings import load_settings, read_config_text
from pacekeeper.cli.doctor import agent_checks, controller_checks
from pacekeeper.cli.doctor.checks import Check, Health, failed_check, run_check
from pacekeeper.cli.doctor.file_checks import NamedCheck, check_controller_reachable
from pacekeeper.core.config.agent import AgentConfig
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.loader import find_errors
from pacekeeper.core.errors import ConfigError

# Tables that only this service reads; a file without them is not meant for it.
_OWN = {
    "controller": (
        "controller", "detector", "policy", "access", "limits", "webhook", "lease", "retention",
    ),
    "agent": ("agent",),
    "client": ("client",),
}  # fmt: skip


def check_config(config_file: str, readers: tuple[str, ...] = ()) -> tuple[Check, ...]:
    """Check a settings file and everything that it names.

    Args:
        config_file: path of the TOML file.
        readers: services that read it; default: by its tables.
    """
    try:
        text = read_config_text(config_file)
    except ConfigError as error:
        return (failed_check("file", error),)
    if wrong := find_errors(text, file=config_file):
        return tuple(failed_check("file", error) for error in wrong)
    tables = tuple(tomllib.loads(text))
    readers = readers or readers_of(tables)
    known = ", ".join(f"[{table}]" for table in tables) or "no tables: all defaults"
    first = Check(name="file", health=Health.OK, found=f"{known}; read by {' and '.join(readers)}")
    has_controller = "controller" in readers
    own = load_settings(ControllerConfig, config_file) if has_controller else None
    return (
        first,
        *(check for reader in readers for check in _checks_of_reader(reader, config_file, own)),
    )


def readers_of(tables: tuple[str, ...]) -> tuple[str, ...]:
    """Return the services that alone read one of these tables; default: the controller."""
    found = tuple(reader for reader, own in _OWN.items() if set(own).intersection(tables))
    return found or ("controller",)


def _checks_of_reader(
    reader: str, config_file: str, own: ControllerConfig | None
) -> Iterator[Check]:
    checks: Iterator[NamedCheck]
    match reader:
        case "controller":
            checks = controller_checks.controller_checks(
                load_settings(ControllerConfig, config_file)
            )
        case "agent":
            checks = agent_checks.agent_checks(
                load_settings(AgentConfig, config_file), "" if own is None else own.listen
            )
        case _:
            client = load_settings(ClientConfig, config_file)
            own_address = "" if own is None else own.api_listen
            checks = iter(
                [("controller", partial(check_controller_reachable, client, own_address))]
            )
    for name, check in checks:
        extra = "cli" if reader == "client" else reader
        yield run_check(f"{reader}: {name}", check, extra=extra)
