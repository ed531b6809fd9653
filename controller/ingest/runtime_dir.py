"""The folder in which a controller and its ingest process meet: its owner's only, and gone with it.

One that was killed leaves its folder to the next controller of the same user, who takes it away.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pacekeeper.core.errors import HostError

PREFIX = "pacekeeper-"
SOCKET = "calls"
ANSWERS_WITHIN_S = 1.0
LOOK_S = 2.0


def no_folder(why: str) -> HostError:
    """The two processes have no place to meet."""
    return HostError(why, remedy="let TMPDIR name a short path that can be written to")


async def stays(made: Path) -> None:
    """As long as this socket is there. Raises HostError once it is gone.

    Whoever cleans up where it lies takes the way of all calls but agents' streams, while the port
    still answers: neither people nor probes would get further than that.
    """
    while made.is_socket():
        await asyncio.sleep(LOOK_S)
    raise no_folder(f"{made} is gone, by which calls come: something else takes files away there")


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """A folder that only this user may enter, for as long as it lasts. Raises HostError."""
    sweep()
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX))
            opened = stack.enter_context(_opened(Path(made)))
        except OSError as error:
            raise no_folder(f"no folder can be made for a socket: {error}") from error
        _hold(opened)  # where nothing can be held nobody takes anything away either
        yield Path(made)


def sweep() -> None:
    """Take away what killed controllers left: folders with a socket that nobody holds."""
    for left in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        with contextlib.suppress(OSError), _opened(left) as opened:
            # A living one holds its folder before it makes its socket.
            is_ours = os.fstat(opened).st_uid == os.geteuid()
            if is_ours and _is_dead(left / SOCKET) and _hold(opened):
                shutil.rmtree(left)


def _is_dead(path: Path) -> bool:
    """A socket at which nobody answers. One of an older version answers, and holds no folder."""
    if not path.is_socket():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(ANSWERS_WITHIN_S)
        try:
            caller.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False  # too busy to answer
    return False


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _hold(opened: int) -> bool:
    """Until it is closed; False where somebody else does."""
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
