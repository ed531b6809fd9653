"""gRPC channels, TLS contexts and tokens from files, which are read again when they change.

The only module that passes certificates and tokens to gRPC. Called by agent, controller and CLI.
"""

import logging
import os
import ssl
import stat
import threading
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from pacekeeper.core.config.security import TlsConfig
from pacekeeper.core.errors import ConfigError, HostError, PacekeeperError
from pacekeeper.protos.convert import reports

MAX_PEM_BYTES = 1 << 20
MAX_TOKEN_BYTES = 4096
_log = logging.getLogger(__name__)
Metadata = tuple[tuple[str, str], ...]
_T = TypeVar("_T")


def client_channel(address: str, tls: TlsConfig) -> grpc.Channel:
    """A channel to a controller. Raises as `check_client`."""
    if not tls.is_on:
        return grpc.insecure_channel(address, options=reports.GRPC_OPTIONS_CLIENT)
    credentials = _client_credentials(tls)
    return grpc.secure_channel(address, credentials, options=reports.GRPC_OPTIONS_CLIENT)


def aio_channel(address: str, tls: TlsConfig) -> grpc.aio.Channel:
    """A channel of grpc.aio to a controller. Raises as `check_client`."""
    if not tls.is_on:
        return grpc.aio.insecure_channel(address, options=reports.GRPC_OPTIONS_CLIENT)
    credentials = _client_credentials(tls)
    return grpc.aio.secure_channel(address, credentials, options=reports.GRPC_OPTIONS_CLIENT)


def check_client(tls: TlsConfig, token_file: str) -> None:
    """Check the files of a client.

    Raises:
        ConfigError: A certificate, key or token is not usable.
        HostError: A file cannot be read.
    """
    _client_credentials(tls)
    read_token(token_file)


def bearer_metadata(token: str) -> Metadata:
    """Call metadata with the token; empty without one."""
    return (("authorization", f"Bearer {token}"),) if token else ()


def read_token(path: str) -> str:
    """Read a token from a file with mode 0600; empty for no path. Raises as `check_client`."""
    if not path:
        return ""
    text = _read(path, MAX_TOKEN_BYTES, forbidden=0o077).decode("ascii", errors="replace").strip()
    if not text or not text.isprintable() or " " in text:
        raise ConfigError(f"{path}: expected one token, as `pacekeeper tokens add` printed it")
    return text


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    """Credentials of a gRPC server; changed files are used from the next connection on.

    With a `ca` every client needs a certificate from it. Changed files that are not usable are
    logged, and the previous ones stay in use. Raises as `check_client`.
    """
    files = _ReloadedFiles(tls, _grpc_configuration)

    def changed() -> Any:
        """The configuration if it is a new one; None: that of before."""
        return files.value if files.refresh() else None

    return grpc.dynamic_ssl_server_credentials(
        files.value, changed, require_client_authentication=bool(tls.ca)
    )


class ServerContexts:
    """A server's TLS context, made anew when its files change.

    With a `ca` every client needs a certificate from it. Changed files that are not usable are
    logged, and the context of before stays in use.
    """

    def __init__(self, tls: TlsConfig) -> None:
        """Read the files. Raises as `check_client`."""
        self._files = _ReloadedFiles(tls, self._context)

    def now(self) -> ssl.SSLContext:
        """The context for a connection that begins now."""
        self._files.refresh()
        return self._files.value

    def for_listener(self) -> ssl.SSLContext:
        """A context for a listening socket: each of its connections uses the files of its time."""

        def use_current_files(connection: ssl.SSLObject, *_: object) -> None:
            connection.context = self.now()

        context = self.now()
        context.sni_callback = use_current_files
        return context

    def _context(self, tls: TlsConfig) -> ssl.SSLContext:
        context = server_context(tls)
        # No session resumption: a client's certificate is checked at each connection.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        return context


class _ReloadedFiles(Generic[_T]):
    """A value made of a server's certificate files, made anew when they change.

    Changed files that are not usable are logged, and the value of before stays in use.
    """

    def __init__(self, tls: TlsConfig, make: Callable[[TlsConfig], _T]) -> None:
        """Read the files. Raises as `make`."""
        self._tls, self._make = tls, make
        self._lock = threading.Lock()
        self._stamp = _stamps(tls)
        self.value = make(tls)

    def refresh(self) -> bool:
        """Read the files if they changed; return whether there is a new value."""
        with self._lock:
            stamp = _stamps(self._tls)
            if stamp == self._stamp:
                return False
            self._stamp = stamp
            try:
                self.value = self._make(self._tls)
            except PacekeeperError as error:
                _log.error(
                    "changed certificates are not usable, the previous ones stay in use: %s", error
                )
                return False
            _log.info("certificate=%s read again", self._tls.cert)
            return True


def _grpc_configuration(tls: TlsConfig) -> Any:
    cert, key = _pair(tls)
    root = _read(tls.ca, MAX_PEM_BYTES) if tls.ca else None
    return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=root)


def _stamps(tls: TlsConfig) -> tuple[tuple[int, int, int] | None, ...]:
    return tuple(file_stamp(path) for path in (tls.cert, tls.key, tls.ca))


def _client_credentials(tls: TlsConfig) -> grpc.ChannelCredentials:
    root = _read(tls.ca, MAX_PEM_BYTES) if tls.ca else None
    cert, key = _pair(tls) if tls.cert else (None, None)
    return grpc.ssl_channel_credentials(root, key, cert)


def server_context(tls: TlsConfig) -> ssl.SSLContext:
    """A server's TLS context; with a `ca` every client needs a certificate from it.

    Raises as `check_client`.
    """
    _pair(tls)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.cert, tls.key, password="")
        if tls.ca:
            context.load_verify_locations(cadata=_read(tls.ca, MAX_PEM_BYTES).decode("ascii"))
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:
        raise ConfigError(f"{tls.ca or tls.cert}: {error}", remedy="the file must be PEM") from None
    return context


def _pair(tls: TlsConfig) -> tuple[bytes, bytes]:
    """Certificate and key. Raises ConfigError if they do not match, which gRPC does not report."""
    cert = _read(tls.cert, MAX_PEM_BYTES)
    key = _read(tls.key, MAX_PEM_BYTES, forbidden=0o027)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.cert, tls.key, password="")
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", None) or str(error)
        raise ConfigError(
            f"{tls.cert}, {tls.key}: not a certificate with its key: {why}",
            remedy="both must be PEM without a password, and match",
        ) from None
    return cert, key


def _read(path: str, max_bytes: int, forbidden: int = 0) -> bytes:
    """Read a file. Raises HostError; ConfigError if its size or a `forbidden` mode bit is wrong."""
    try:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or not 0 < status.st_size <= max_bytes:
                raise ConfigError(f"{path}: expected a file of 1 to {max_bytes} bytes")
            if status.st_mode & forbidden:
                raise ConfigError(
                    f"{path}: its mode lets other users read it", remedy=f"chmod 600 {path}"
                )
            return file.read(max_bytes)
    except OSError as error:  # HostError, as the file may appear later: a service is restarted
        raise HostError(f"{path}: {error.strerror}") from None


def certificate_end_unix_s(path: str) -> float:
    """The end of validity of the first certificate in a PEM file, in Unix seconds.

    Raises:
        HostError: The file cannot be read.
        ConfigError: It holds no certificate in PEM form.
    """
    from cryptography.x509 import load_pem_x509_certificate  # 10 MB, for hosts with certificates

    data = _read(path, MAX_PEM_BYTES)
    try:
        return load_pem_x509_certificate(data).not_valid_after_utc.timestamp()
    except ValueError as error:
        raise ConfigError(f"{path}: no certificate in PEM form: {error}") from None


def file_stamp(path: str) -> tuple[int, int, int] | None:
    """Value that changes with the file; None if it is missing."""
    if not path:
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def with_token(channel: grpc.Channel, token: str) -> grpc.Channel:
    """A channel that sends the token with each call; the channel itself without a token."""
    return (
        grpc.intercept_channel(channel, _TokenInterceptor(bearer_metadata(token)))
        if token
        else channel
    )


class _TokenInterceptor(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Adds the token to the metadata of calls with one request."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        """A call with one response."""
        return continuation(self._with(details), request)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        """A call with a stream of responses."""
        return continuation(self._with(details), request)

    def _with(self, details: Any) -> Any:
        return _Details(
            method=details.method,
            timeout=details.timeout,
            metadata=(*(details.metadata or ()), *self._metadata),
            credentials=details.credentials,
            wait_for_ready=details.wait_for_ready,
            compression=details.compression,
        )


@dataclass(frozen=True, kw_only=True)
class _Details(grpc.ClientCallDetails):
    """A call's details as gRPC expects them."""

    method: str
    timeout: float | None
    metadata: tuple[tuple[str, str | bytes], ...] | None
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses HTTP redirects: tokens and signed requests go to the configured server only."""

    def redirect_request(self, *_: Any) -> None:
        """Return no request, so that the redirect's status is the answer."""
        return None
