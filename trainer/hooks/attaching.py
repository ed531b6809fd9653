"""What people tell when they attach a rank, checked where it comes in. Standard library only."""

import os

LIFE_VARIABLE = "PACEKEEPER_LIFE"


def life_of_environment() -> int:
    """The number of this launch, as a launcher set it; 0: none did."""
    text = os.environ.get(LIFE_VARIABLE, "")
    if text and not (text.isascii() and text.isdigit()):
        raise ValueError(f"{LIFE_VARIABLE}: expected a whole number above 0, got {text!r}")
    return int(text or 0)


def checked_place(rank: int, world_size: int) -> tuple[int, int]:
    """Both; raises ValueError where they can not be, saying what they should."""
    for name, value in (("rank", rank), ("world_size", world_size)):
        if not isinstance(value, int):
            raise ValueError(
                f"{name}={value!r}: expected a whole number; of the environment, "
                f'int(os.environ["{name.upper()}"])'
            )
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank {rank} is not in a world of {world_size}: ranks count from 0 over all nodes; "
            "give both as torch.distributed or the launcher (RANK, WORLD_SIZE) does"
        )
    return rank, world_size
