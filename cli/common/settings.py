"""The settings of a command: defaults, then a file's, then the command line's."""

from pathlib import Path
from typing import Any, TypeVar

from pacekeeper.core.config.loader import override, read_config
from pacekeeper.core.errors import ConfigError

T = TypeVar("T")


def settings(kind: type[T], config_file: str | None, **given: Any) -> T:
    """Settings of `kind`; values of None on the command line leave the file's.

    Raises ConfigError that names the file (or the command line), the key and what was expected.
    """
    found = kind()
    if config_file is not None:
        found = read_config(kind, config_text(config_file), file=config_file)
    return override(found, **given)


def config_text(config_file: str) -> str:
    """What stands in a file of settings. Raises ConfigError."""
    try:
        return Path(config_file).read_text()
    except OSError as error:
        raise ConfigError(f"{config_file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{config_file}: not UTF-8 text: {error.reason}") from None
