"""Bearer tokens and the file that stores them.

A token is `pk1.ID.SECRET`. Its secret has 256 random bits, so its SHA-256, which is all that is
stored, cannot be reversed by guessing. Every token expires. `pacekeeper tokens` writes the file,
and the controller reads it again when it changes.
"""

import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pacekeeper.controller.api.auth.rbac import Principal, Role, anonymous, principal_of_token
from pacekeeper.core.errors import ConfigError, HostError
from pacekeeper.core.telemetry.attachment import is_node_name

FORMAT = 1
PREFIX = "pk1"
MAX_TOKENS = 10_000
_TOKEN = re.compile(r"pk1\.([0-9a-f]{8})\.([A-Za-z0-9_-]{43})", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_ROLES = (Role.VIEWER, Role.OPERATOR, Role.AGENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """The stored part of a token. An agent's `name` is its node. Raises ValueError if invalid."""

    token_id: str
    secret_sha256: str
    role: Role
    name: str
    created_unix_s: float
    expires_unix_s: float

    def __post_init__(self) -> None:
        if re.fullmatch("[0-9a-f]{8}", self.token_id, re.ASCII) is None:
            raise ValueError(f"token id: expected 8 hex digits, got {self.token_id!r:.40}")
        if _DIGEST.fullmatch(self.secret_sha256) is None:
            raise ValueError(f"token {self.token_id}: expected a SHA-256")
        if self.role not in _ROLES:
            raise ValueError(f"token {self.token_id}: tokens cannot have the role {self.role}")
        if not is_node_name(self.name):
            raise ValueError(f"token {self.token_id}: name: expected 1 to 253 printable characters")
        if not 0.0 <= self.created_unix_s <= self.expires_unix_s < float("inf"):
            raise ValueError(f"token {self.token_id}: expires before it was created, or never")


def format_token(token_id: str, secret: str) -> str:
    """The token as its holder gets it."""
    return f"{PREFIX}.{token_id}.{secret}"


def secret_digest(secret: str) -> str:
    """The SHA-256 of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def encode_tokens(records: Iterable[TokenRecord]) -> bytes:
    """Encode the file, tokens in order of creation."""
    ordered = sorted(records, key=lambda record: (record.created_unix_s, record.token_id))
    document = {"format": FORMAT, "tokens": [asdict(record) for record in ordered]}
    return (json.dumps(document, indent=1) + "\n").encode()


def decode_tokens(data: bytes) -> tuple[TokenRecord, ...]:
    """Decode a token file. Raises ValueError for anything else."""
    try:
        document: Any = json.loads(data)
        if document["format"] != FORMAT:
            raise ValueError(f"token file format {document['format']!r:.20}, not {FORMAT}")
        found = tuple(_record(plain) for plain in document["tokens"])
    except (TypeError, KeyError, OverflowError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"not a token file: {error!r:.200}") from None
    if len(found) > MAX_TOKENS or len({record.token_id for record in found}) != len(found):
        raise ValueError(f"token file: more than {MAX_TOKENS} tokens, or a duplicate id")
    return found


def _record(plain: Any) -> TokenRecord:
    values = {field.name: plain[field.name] for field in fields(TokenRecord)}
    for name in ("created_unix_s", "expires_unix_s"):
        if type(values[name]) not in (int, float):
            raise TypeError(f"{name}: expected a number")
        values[name] = float(values[name])
    if not all(type(values[name]) is str for name in ("token_id", "secret_sha256", "name", "role")):
        raise TypeError("expected text")
    return TokenRecord(**(values | {"role": Role(values["role"])}))


def authenticate_token(shown: str, records: Sequence[TokenRecord], now_unix_s: float) -> Principal:
    """The holder of a token, or an anonymous principal with the reason."""
    found = _TOKEN.fullmatch(shown)
    if found is None:
        return anonymous("the credential is not a token")
    for record in records:
        if record.token_id != found[1]:
            continue
        if not hmac.compare_digest(record.secret_sha256, secret_digest(found[2])):
            break
        who = f"{record.role}/{record.name} by token"
        if now_unix_s >= record.expires_unix_s:
            return anonymous(f"token {record.token_id} has expired", f"{who}, expired")
        return principal_of_token(
            record.role, record.name, record.name if record.role is Role.AGENT else ""
        )
    return anonymous("the token does not exist or was revoked")


MAX_BYTES = 16 << 20
_log = logging.getLogger(__name__)
Records = tuple[TokenRecord, ...]


class TokenFile:
    """A controller's view of the token file."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises ConfigError if it cannot be read."""
        self.path = path
        self._stamp = _stamp(path)
        self._records = read_tokens(path)

    def records(self) -> Records:
        """The tokens in the file now; none while it cannot be read."""
        stamp = _stamp(self.path)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._records = read_tokens(self.path)
                _log.info(
                    "Read the changed token file %s: %d tokens", self.path, len(self._records)
                )
            except ConfigError as error:
                self._records = ()
                _log.error("No token is accepted: %s", error)
        return self._records


def read_tokens(path: Path) -> Records:
    """The tokens in a file. Raises ConfigError if it is unreadable, unsafe or no token file."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                raise ConfigError(f"{path}: not a token file")
            if status.st_mode & 0o077:
                raise ConfigError(
                    f"{path}: users other than its owner can access it", remedy=f"chmod 600 {path}"
                )
            return decode_tokens(file.read(MAX_BYTES))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def change_tokens(path: Path, change: Callable[[Records], Records]) -> None:
    """Replace the tokens in a file atomically; a missing file counts as empty.

    Raises:
        ConfigError: It is not a token file.
        HostError: It cannot be written.
    """
    try:
        with _locked(path.parent):
            before = read_tokens(path) if path.exists() else ()
            _replace(path, encode_tokens(change(before)))
    except OSError as error:
        raise HostError(f"{path}: {error.strerror}") from None


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock on token files of a directory."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, data: bytes) -> None:
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        fresh.replace(path)
    except OSError:
        with suppress(OSError):
            fresh.unlink()
        raise


def _stamp(path: Path) -> tuple[int, int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode
