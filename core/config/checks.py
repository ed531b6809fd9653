"""Checks of settings; each raises ValueError that names the setting and the bound."""

from pacekeeper.core.addresses import split_addresses


def positive(owner: object, *names: str) -> None:
    """Each of these settings is above 0."""
    for name in names:
        if not getattr(owner, name) > 0:
            raise ValueError(f"{name}: expected a value above 0, got {getattr(owner, name)}")


def at_least(owner: object, floor: float, *names: str) -> None:
    """Each of these settings is at least `floor`."""
    for name in names:
        if not getattr(owner, name) >= floor:
            raise ValueError(f"{name}: expected at least {floor}, got {getattr(owner, name)}")


def one_of(owner: object, name: str, *values: str) -> None:
    """This setting is one of `values`."""
    if getattr(owner, name) not in values:
        expected = ", ".join(repr(str(value)) for value in values)
        raise ValueError(f"{name}: expected one of {expected}, got {getattr(owner, name)!r}")


def at_most(owner: object, ceiling: float, *names: str) -> None:
    """Each of these settings is at most `ceiling`."""
    for name in names:
        if not getattr(owner, name) <= ceiling:
            raise ValueError(f"{name}: expected at most {ceiling:g}, got {getattr(owner, name)}")


def address(owner: object, *names: str, first_port: int = 1) -> None:
    """Each is HOST:PORT; with `first_port` 1 possibly several, separated by commas."""
    for name in names:
        try:
            split_addresses(getattr(owner, name), first_port=first_port)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


MAX_WAIT_S = 7 * 86400.0  # of anything in a step: beyond, clocks of libraries overflow
