"""What settings of agent and controller have in common: certificates, ports, folders, a way."""

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from pacekeeper.cli.doctor.checks import Check, Health
from pacekeeper.core.addresses import split_address, split_addresses
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.core.errors import ConfigError, HostError, UnreachableError, listen_error

SOON_S = 2 * 86_400.0  # as the alert PacekeeperCertificateEnds has it
REACH_S = 3.0
Look = tuple[str, Callable[[], Check | str]]


def certificates(files: dict[str, str]) -> Iterator[Look]:
    """Of each that is named (by its setting): is it one, and until when?"""
    for setting, path in files.items():
        if path:
            yield setting, partial(certificate, path, time.time())


def certificate(path: str, unix_s: float) -> Check | str:
    """Until when it counts. Raises ConfigError where it is over or none, HostError: not there."""
    from pacekeeper.protos import tls

    left_s = tls.certificate_end_unix_s(path) - unix_s
    if left_s <= 0.0:
        raise ConfigError(
            f"{path}: over since {-left_s / 86_400.0:.1f} days",
            remedy="renew it: `pacekeeper certs renew`, or your authority",
        )
    found = f"{path}: {left_s / 86_400.0:.1f} days left"
    if left_s < SOON_S:
        return Check(name="", health=Health.LIMITED, found=found, remedy="renew it before it ends")
    return found


def unprotected(whys: Sequence[str], *, is_told: bool, remedy: str) -> Check | str:
    """What goes, or may be asked for, beyond loopback like that. Raises ConfigError unless told."""
    if not whys:
        return "nothing beyond loopback is unprotected"
    if not is_told:
        raise ConfigError("; ".join(whys), remedy=remedy)
    return Check(
        name="", health=Health.LIMITED, found="; ".join(whys), remedy=f"told to: or {remedy}"
    )


def port(option: str, address: str) -> Check | str:
    """May this user listen there? A taken port may well be the very service. Raises HostError."""
    host, number = split_address(address, first_port=0)
    try:
        family, kind, *_, place = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        told = listen_error(address, error, option=option, rival="it, or another service,")
        if error.errno == errno.EADDRINUSE:
            return Check(name="", health=Health.LIMITED, found=told.what, remedy=told.remedy)
        raise told from None
    return f"{address} is free"


def folder_of(path: Path) -> str:
    """Where a file or folder is to be made. Raises HostError where this user may not."""
    folder = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if not folder.is_dir():
        folder = folder.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        raise HostError(
            f"{path}: this user may not write in {folder}",
            remedy="run doctor as the user who runs the service, or give it the folder",
        )
    return f"{path}"


def reaches(config: ClientConfig, ours: str = "") -> Check | str:
    """Does a controller answer, and believe who asks as far as health is answered?

    `ours`: where the controller of the same file listens, which may not be started yet. Raises
    UnreachableError where none does, and as `client.connected` for files of no use.
    """
    told, first = list[str](), None
    for address in split_addresses(config.controller):
        try:
            told.append(f"{address} {_health(config, address)}")
        except UnreachableError as error:
            first = first or error
            told.append(f"{address} does not answer")
    if first is not None and config.controller == ours:
        return Check(
            name="", health=Health.LIMITED, found=first.what, remedy="start the controller first"
        )
    if first is not None and len(told) == 1:
        raise first
    if all(one.endswith("does not answer") for one in told):
        assert first is not None, "nobody answered"
        raise UnreachableError("; ".join(told), remedy=first.remedy)
    if first is not None:
        return Check(
            name="", health=Health.LIMITED, found="; ".join(told), remedy="start the others, too"
        )
    return "; ".join(told)


def _health(config: ClientConfig, address: str) -> str:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from pacekeeper.cli.common.client import connected

    with connected(replace(config, controller=address)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=REACH_S)
    is_serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return "serves" if is_serving else "answers: it stands by, or its store refuses"
