"""Every failure people see: each class says whose fault it is and has its own exit code."""

import errno
from enum import IntEnum


class ExitCode(IntEnum):
    """What a `pacekeeper` command returns to the shell."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    CONFIG = 3
    HOST = 4
    VERSION = 5
    UNREACHABLE = 6
    LOST_STATE = 7
    NO_QUORUM = 8
    DATA = 9
    CORRUPT_STATE = 10
    DENIED = 11
    UNFIT = 12  # of `pacekeeper healthcheck` only: the answer, no failure


class PacekeeperError(Exception):
    """A failure with a remedy: `what` happened and what the reader can do about it."""

    exit_code = ExitCode.INTERNAL

    def __init__(self, what: str, *, remedy: str = "") -> None:
        super().__init__(what if not remedy else f"{what}; {remedy}")
        self.what = what
        self.remedy = remedy


class ConfigError(PacekeeperError):
    """The configuration is wrong: names file, key and what was expected."""

    exit_code = ExitCode.CONFIG


class HostError(PacekeeperError):
    """This machine refuses: a port in use, a directory without permission, a full disk."""

    exit_code = ExitCode.HOST


def listen_error(address: str, error: OSError, *, option: str, rival: str) -> HostError:
    """Nobody can listen on `address`, named with `option`; `rival` is who may have the port."""
    if error.errno is not None and error.errno < 0:  # of name resolution: codes of its own
        remedy = f"no host of this name is known here: give {option} an address of this machine"
    elif error.errno == errno.EADDRNOTAVAIL:
        remedy = f"give {option} an address of this machine"
    elif error.errno == errno.EACCES:
        remedy = f"ports below 1024 are for privileged users: choose another port with {option}"
    elif error.errno == errno.EADDRINUSE:
        remedy = f"{rival} may be there: choose another port with {option}"
    else:
        remedy = f"choose another {option} HOST:PORT"
    why = error.strerror or str(error)
    return HostError(f"can not listen on {address}: {why}", remedy=remedy)


class VersionError(PacekeeperError):
    """Two parts of different versions met; neither is wrong alone."""

    exit_code = ExitCode.VERSION


class UnreachableError(PacekeeperError):
    """The other side does not answer."""

    exit_code = ExitCode.UNREACHABLE


class DeniedError(PacekeeperError):
    """The other side knows who asks, or does not, and will not answer."""

    exit_code = ExitCode.DENIED


class DataError(PacekeeperError):
    """A file given to us is not what it should be: names the file and what was expected."""

    exit_code = ExitCode.DATA


class LostStateError(PacekeeperError):
    """State has no living holder any more; only a checkpoint can bring it back."""

    exit_code = ExitCode.LOST_STATE


class CorruptStateError(PacekeeperError):
    """Copies of one block are not the same: some of them are wrong, and nobody knows since when."""

    exit_code = ExitCode.CORRUPT_STATE


class NoQuorumError(PacekeeperError):
    """Too few ranks are left on this side of a broken network: the others may go on."""

    exit_code = ExitCode.NO_QUORUM
