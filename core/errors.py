"""The errors that users see; each class has its own exit code."""

import errno
from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of `pacekeeper` commands."""

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
    """A failure with its remedy: `what` happened and what the user can do."""

    exit_code = ExitCode.INTERNAL

    def __init__(self, what: str, *, remedy: str = "") -> None:
        super().__init__(what if not remedy else f"{what}; {remedy}")
        self.what = what
        self.remedy = remedy


class ConfigError(PacekeeperError):
    """The configuration is wrong: names file, key and what was expected."""

    exit_code = ExitCode.CONFIG


class HostError(PacekeeperError):
    """This machine prevents it: a port in use, a directory without permission, a full disk."""

    exit_code = ExitCode.HOST


def listen_error(address: str, error: OSError, *, option: str, rival: str) -> HostError:
    """The error for a failed listen on `address`.

    Args:
        address: HOST:PORT.
        error: the exception of the socket.
        option: the command line option of the address.
        rival: the program that may use the port.
    """
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
    return HostError(f"cannot listen on {address}: {why}", remedy=remedy)


class VersionError(PacekeeperError):
    """Two parts of different versions are combined."""

    exit_code = ExitCode.VERSION


class UnreachableError(PacekeeperError):
    """The other side does not answer."""

    exit_code = ExitCode.UNREACHABLE


class DeniedError(PacekeeperError):
    """A caller's identity or permission is rejected, by the other side or by this one."""

    exit_code = ExitCode.DENIED


class DataError(PacekeeperError):
    """An input file is invalid; the message names the file and the expectation."""

    exit_code = ExitCode.DATA


class LostStateError(PacekeeperError):
    """A block has no living holder; only a checkpoint can restore it."""

    exit_code = ExitCode.LOST_STATE


class CorruptStateError(PacekeeperError):
    """Copies of one block differ: some of them are wrong, since an unknown step."""

    exit_code = ExitCode.CORRUPT_STATE


class NoQuorumError(PacekeeperError):
    """Too few ranks are left on this side of a network partition; the other side may continue."""

    exit_code = ExitCode.NO_QUORUM
