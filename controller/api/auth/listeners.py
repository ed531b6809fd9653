"""How a controller is entered: who may listen where, with which certificate, behind which gate."""

import logging
import socket
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import grpc.aio

from pacekeeper.controller.api.auth.audit_log import AuditEvent, AuditLog
from pacekeeper.controller.api.auth.interceptor import AuthInterceptor
from pacekeeper.controller.api.auth.rbac import Role
from pacekeeper.controller.api.auth.tokens import TokenFile
from pacekeeper.controller.observability.metrics import ControllerMetrics
from pacekeeper.controller.state.state import State
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.metrics import unauthenticated_metrics
from pacekeeper.core.config.security import unauthenticated_listener
from pacekeeper.core.errors import ConfigError
from pacekeeper.protos import tls as secure
from pacekeeper.protos.convert import reports

_log = logging.getLogger(__name__)
OPEN_REMEDY = (
    "give it a certificate ([tls], `pacekeeper certs`) and callers to tell apart, listen on "
    "127.0.0.1, or say --insecure"
)


def reject_unprotected_listeners(config: ControllerConfig) -> None:
    """Raises ConfigError where it would listen beyond loopback unprotected, and was not told to."""
    for why in unprotected_listeners(config):
        if not config.insecure:
            raise ConfigError(why, remedy=OPEN_REMEDY)
        _log.warning("insecure: %s", why)


def unprotected_listeners(config: ControllerConfig) -> list[str]:
    """Where it would listen beyond loopback unprotected. Raises ConfigError for half a [tls]."""
    if config.tls.ca and not config.tls.cert:
        raise ConfigError("[tls] ca: a controller that asks for certificates needs one of its own")
    whys = [unauthenticated_listener("--listen", config.listen, config.tls, config.access.tokens)]
    if config.metrics_listen:
        whys.append(unauthenticated_metrics(config.metrics_listen, config.metrics))
    if config.web:  # browsers are asked for no certificate
        tls = replace(config.tls, ca="")
        whys.append(unauthenticated_listener("--web", config.web, tls, config.access.tokens))
    return [why for why in whys if why]


def bind_error(host: str, port: int) -> OSError:
    """The system's word for why nobody can listen there: gRPC keeps it for itself."""
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError as error:
        return error
    return OSError("gRPC refuses the address")


class ListenerSetup:
    """The gate of one controller and what is behind it: audit log, tokens, certificate."""

    def __init__(
        self, config: ControllerConfig, *, state: Callable[[], State], metrics: ControllerMetrics
    ) -> None:
        """Raises ConfigError (tokens, certificates) and HostError (audit log)."""
        self._config = config
        self._failed_handshakes = 0
        self.audit = AuditLog(
            Path(config.access.audit or f"{config.store}.audit.jsonl"),
            max_bytes=config.access.audit_max_bytes,
            kept=config.access.audit_kept,
            on_failure=metrics.audit_failures.inc,
            on_refused=metrics.refusals.inc,
        )
        tokens = TokenFile(Path(config.access.tokens)) if config.access.tokens else None
        self.tokens = tokens
        self.gate = AuthInterceptor(
            asks=bool(config.tls.ca) or tokens is not None,
            config=config.access,
            limits=config.limits,
            tokens=tokens,
            audit=self.audit,
            state=state,
        )

    def server(self) -> grpc.aio.Server:
        """A server of which every method is behind the gate; callers come to it by the front."""
        return grpc.aio.server(
            interceptors=(self.gate,),
            options=reports.server_options(self._config.limits.max_report_bytes, None),
        )

    def settings(self, listen: str, inner: str) -> dict[str, Any]:
        """How the front shall serve, and where it hands on what is no agent's stream.

        Raises ConfigError (certificates).
        """
        limits, tls = self._config.limits, self._config.tls
        if tls.cert:
            secure.ServerContexts(tls)  # to see that they are good
        return {
            "listen": listen,
            "inner": inner,
            "tls": asdict(tls),
            "max_report_bytes": limits.max_report_bytes,
            "connection_s": limits.connection_s if tls.cert else None,
            "reports": {"per_s": limits.reports_per_s, "at_once": limits.reports_at_once},
        }

    def count_handshake_failure(self) -> None:
        """Count a TLS handshake that failed in the front."""
        self._failed_handshakes += 1

    def note_plan(self, job: str, about: str, reason: str) -> None:
        """The controller itself decided on something."""
        about = f"job={job} {about}"
        self.audit.note(
            AuditEvent(
                action="plan", caller="controller", is_allowed=True, about=about, reason=reason
            )
        )

    def audit_handshake_failures(self) -> None:
        """Audit the handshakes that failed since the last call as one entry with a count."""
        count, self._failed_handshakes = self._failed_handshakes, 0
        if count:
            self.audit.note(
                AuditEvent(
                    action="connect",
                    caller=Role.NOBODY,
                    is_allowed=False,
                    reason="the TLS handshake failed: no certificate, an expired one, one of "
                    "another authority, or a port probe",
                    count=count,
                )
            )

    def close(self) -> None:
        """Nothing more is written down."""
        self.audit.close()
