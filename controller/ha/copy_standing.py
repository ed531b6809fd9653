"""What a controller under a lease may do with what stands where its store should. Pure."""

from enum import Enum, auto


class Standing(Enum):
    """What it may do."""

    STANDS = auto()  # it may lead with it, if the lease's record names it
    AWAITS = auto()  # it takes a snapshot from whoever leads, and leads with nothing before
    REFUSED = auto()  # it may be all that is left of what was told: a person decides


def standing(mark: str | None, *, is_there: bool, is_damaged: bool) -> Standing:
    """`mark`: what it says; None: there is none. A copy that is gone is no store without a past."""
    if is_damaged:
        return Standing.REFUSED if mark is None else Standing.AWAITS
    return Standing.STANDS if is_there or mark is None else Standing.AWAITS
