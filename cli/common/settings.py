"""Settings of a command: defaults, overridden by a TOML file, overridden by the command line."""

from pathlib import Path
from typing import Any, TypeVar

from pacekeeper.core.config.loader import override, read_config
from pacekeeper.core.errors import ConfigError

T = TypeVar("T")
MAX_BYTES = 1_000_000


def load_settings(kind: type[T], config_file: str | None, **given: Any) -> T:
    """Load settings of one kind.

    Args:
        kind: the settings class, for example `ClientConfig`.
        config_file: path of a TOML file; None: defaults only.
        given: values of the command line; None keeps the value of the file.

    Raises:
        ConfigError: names the file (or the command line), the key and the expected value.
    """
    found = kind()
    if config_file is not None:
        found = read_config(kind, read_config_text(config_file), file=config_file)
    return override(found, **given)


def read_config_text(config_file: str) -> str:
    """Return the text of a settings file or pipe.

    Raises:
        ConfigError: the file is not readable, larger than MAX_BYTES, or not UTF-8.
    """
    try:
        with Path(config_file).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:  # a device such as /dev/zero has no end
            raise ConfigError(f"{config_file}: not a settings file: more than {MAX_BYTES:,} bytes")
        return data.decode("utf-8-sig")  # as editors on Windows write it
    except OSError as error:
        raise ConfigError(f"{config_file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{config_file}: not UTF-8: {error.reason}") from None
