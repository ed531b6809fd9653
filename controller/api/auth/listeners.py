"""Builds what stands in front of the controller's services: audit log, authenticator, gRPC server.

Also checks that no listener beyond loopback is unprotected unless `insecure` is set. Used by
`controller/app` and, for the checks, by standbys.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import grpc.aio

from pacekeeper.controller.api.auth.audit_log import AuditEvent, AuditLog
from pacekeeper.controller.api.auth.authenticator import Authenticator
from pacekeeper.controller.api.auth.interceptor import AuthInterceptor
from pacekeeper.controller.api.auth.rbac import Principal, Role
from pacekeeper.controller.api.auth.tokens import TokenFile
from pacekeeper.controller.api.refusals import for_people_only
from pacekeeper.controller.observability.metrics import ControllerMetrics
from pacekeeper.controller.state.state import State
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.metrics import unauthenticated_metrics
from pacekeeper.core.config.security import unauthenticated_listener
from pacekeeper.core.errors import ConfigError
from pacekeeper.protos import tls as secure
from pacekeeper.protos.convert import reports

_log = logging.getLogger(__name__)
_CONTROLLER = Principal(name="controller", role=Role.CONTROLLER)
OPEN_REMEDY = (
    "configure a certificate ([tls], `pacekeeper certs`) and authentication, listen on 127.0.0.1, "
    "or pass --insecure"
)


def reject_unprotected_listeners(config: ControllerConfig) -> None:
    """Raises ConfigError for an unprotected listener beyond loopback, unless `insecure` is set."""
    for reason in unprotected_listeners(config):
        if not config.insecure:
            raise ConfigError(reason, remedy=OPEN_REMEDY)
        _log.warning("insecure: %s", reason)


def unprotected_listeners(config: ControllerConfig) -> list[str]:
    """Describe each unprotected listener beyond loopback. Raises ConfigError for half a [tls]."""
    if config.tls.ca and not config.tls.cert:
        raise ConfigError(
            "[tls] ca: a controller that requires certificates needs its own: set [tls] cert"
        )
    found = [
        unauthenticated_listener(option, address, config.tls, config.access.tokens)
        for option, address in (("--listen", config.listen), ("--api-listen", config.api_listen))
    ]
    if config.metrics_listen:
        found.append(unauthenticated_metrics(config.metrics_listen, config.metrics))
    if config.web:  # browsers are not asked for a certificate
        tls = replace(config.tls, ca="")
        found.append(unauthenticated_listener("--web", config.web, tls, config.access.tokens))
    return [reason for reason in found if reason]


def listening_line(listen: str, api_listen: str) -> str:
    """The line that a controller prints once it serves."""
    return f"listening on {listen} for agents, {api_listen} for commands"


class ListenerSetup:
    """Audit log, authenticator and interceptor of one controller."""

    def __init__(
        self, config: ControllerConfig, *, state: Callable[[], State], metrics: ControllerMetrics
    ) -> None:
        """Open the audit log and the token file.

        Args:
            config: The controller's configuration.
            state: Returns the newest state.
            metrics: Counts rejections and audit failures.

        Raises:
            ConfigError: Tokens or certificates are not usable.
            HostError: The audit log cannot be opened.
        """
        self._config = config
        self.audit = AuditLog(
            Path(config.audit_path),
            max_bytes=config.access.audit_max_bytes,
            kept=config.access.audit_kept,
            on_failure=metrics.audit_failures.inc,
            on_rejected=metrics.refusals.inc,
        )
        tokens = TokenFile(Path(config.access.tokens)) if config.access.tokens else None
        self.authenticator = Authenticator(
            is_required=bool(config.tls.ca) or tokens is not None,
            config=config.access,
            tokens=tokens,
        )
        self.interceptor = AuthInterceptor(
            authenticator=self.authenticator,
            limits=config.limits,
            audit=self.audit,
            state=state,
        )

    def server(self, *outer: grpc.aio.ServerInterceptor) -> grpc.aio.Server:
        """The gRPC server of people, behind the interceptor, and behind `outer` before it."""
        return grpc.aio.server(
            handlers=(for_people_only(self._config.listen),),
            interceptors=(*outer, self.interceptor),
            options=reports.server_options(
                self._config.limits.max_question_bytes, self._connection_s
            ),
        )

    @property
    def _connection_s(self) -> float | None:
        """Seconds that a connection lives; None: for ever, as it shows no certificate."""
        return self._config.limits.connection_s if self._config.tls.cert else None

    def settings(self, listen: str, api_listen: str) -> dict[str, Any]:
        """The settings of the ingest process.

        Args:
            listen: Address that agents connect to.
            api_listen: Address that people connect to, for those that call the wrong one.

        Raises:
            ConfigError: The certificates are not usable.
        """
        limits, tls = self._config.limits, self._config.tls
        if tls.cert:
            secure.server_credentials(tls)  # only to check the files
        return {
            "listen": listen,
            "api_listen": api_listen,
            "tls": asdict(tls),
            "max_report_bytes": limits.max_report_bytes,
            "connection_s": self._connection_s,
            "reports": {"per_s": limits.reports_per_s, "at_once": limits.reports_at_once},
        }

    def audit_plan(self, job: str, about: str, reason: str) -> None:
        """Audit a plan that the controller decided on."""
        self.audit.note(
            AuditEvent(
                action="plan",
                principal=_CONTROLLER,
                is_allowed=True,
                about=f"job={job} {about}",
                reason=reason,
            )
        )

    def close(self) -> None:
        """Close the audit log."""
        self.audit.close()
