"""Checks of settings that agent and controller share: certificates, ports, files, controller."""

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from pacekeeper.cli.doctor.checks import Check, Health
from pacekeeper.core.addresses import split_addresses
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.core.errors import ConfigError, HostError, UnreachableError, listen_error
from pacekeeper.core.text import format_s

SOON_S = 2 * 86_400.0  # as in the alert PacekeeperCertificateEnds
REACH_TIMEOUT_S = 3.0
NamedCheck = tuple[str, Callable[[], Check | str]]


def certificate_checks(files: dict[str, str]) -> Iterator[NamedCheck]:
    """Yield a check for each certificate file that is set; keys are the names of the settings."""
    for setting, path in files.items():
        if path:
            yield setting, partial(check_certificate, path, time.time())


def check_certificate(path: str, unix_s: float) -> Check | str:
    """Check the expiry of a certificate.

    Raises:
        ConfigError: the file is not a certificate, or it has expired.
        HostError: the file is not readable.
    """
    from pacekeeper.protos import tls

    left_s = tls.certificate_end_unix_s(path) - unix_s
    if left_s <= 0.0:
        raise ConfigError(
            f"{path}: expired {format_s(-left_s)} ago",
            remedy="renew it with `pacekeeper certs renew` or with your authority",
        )
    found = f"{path}: {format_s(left_s)} left"
    if left_s < SOON_S:
        return Check(
            name="", health=Health.LIMITED, found=found, remedy="renew it before it expires"
        )
    return found


def check_exposure(reasons: Sequence[str], *, is_allowed: bool, remedy: str) -> Check | str:
    """Check what is reachable or sent unprotected beyond loopback.

    Args:
        reasons: one text per unprotected address.
        is_allowed: the setting `insecure`.
        remedy: how to protect them.

    Raises:
        ConfigError: something is unprotected and not allowed.
    """
    if not reasons:
        return "nothing beyond loopback is unprotected"
    if not is_allowed:
        raise ConfigError("; ".join(reasons), remedy=remedy)
    return Check(
        name="",
        health=Health.LIMITED,
        found="; ".join(reasons),
        remedy=f"allowed by insecure = true; otherwise {remedy}",
    )


def check_listen_address(option: str, address: str) -> Check | str:
    """Check that this user can listen on an address; a used port may be the service itself.

    Raises:
        HostError: the address is not one of this machine, or not permitted.
    """
    from pacekeeper.protos.listening import bind_error

    if (error := bind_error(address)) is None:
        return f"{address} is free"
    failure = listen_error(address, error, option=option, rival="this or another service")
    if error.errno == errno.EADDRINUSE:
        return Check(name="", health=Health.LIMITED, found=failure.what, remedy=failure.remedy)
    raise failure


def check_writable(path: Path) -> str:
    """Check that this user can create a file or directory.

    Raises:
        HostError: the nearest existing directory is not writable.
    """
    folder = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if not folder.is_dir():
        folder = folder.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        raise HostError(
            f"{path}: no permission to write in {folder}",
            remedy="run doctor as the user of the service, or change the owner of the directory",
        )
    return f"{path}"


def check_controller_reachable(
    config: ClientConfig,
    own_address: str = "",
    ask: Callable[[ClientConfig, str], str] | None = None,
) -> Check | str:
    """Check that the controllers answer with these credentials.

    Args:
        config: addresses and credentials.
        own_address: address of the controller of the same file, which may not be started yet.
        ask: calls one address and returns how it answers; default: a health check.

    Raises:
        UnreachableError: no controller answers.
        ConfigError, HostError, DeniedError: as `client.open_channel`.
    """
    ask = ask or ask_health
    answers, first = list[str](), None
    for address in split_addresses(config.controller):
        try:
            answers.append(f"{address} {ask(config, address)}")
        except UnreachableError as error:
            first = first or error
            answers.append(f"{address} does not answer")
    if first is not None and config.controller == own_address:
        return Check(
            name="", health=Health.LIMITED, found=first.what, remedy="start the controller first"
        )
    if first is not None and len(answers) == 1:
        raise first
    if all(one.endswith("does not answer") for one in answers):
        assert first is not None, "an address without an answer has an error"
        raise UnreachableError("; ".join(answers), remedy=first.remedy)
    if first is not None:
        return Check(
            name="",
            health=Health.LIMITED,
            found="; ".join(answers),
            remedy="start the other controllers",
        )
    return "; ".join(answers)


def ask_health(config: ClientConfig, address: str) -> str:
    """Ask a controller's port for commands whether it leads. Raises as `client.open_channel`."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from pacekeeper.cli.common.client import open_channel

    with open_channel(replace(config, controller=address)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=REACH_TIMEOUT_S)
    is_serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return "leads" if is_serving else "answers as standby, or its store rejects writes"
