"""Identifies callers of gRPC and of the web page by certificate or bearer token.

`AuthInterceptor` and `WebAuthenticator` share one `Authenticator`. It identifies
callers; it never decides what they may do (`rbac.py`) and writes no audit entries.
"""

import time

from pacekeeper.controller.api.auth import rbac
from pacekeeper.controller.api.auth.peer_identity import PeerIdentity, host_of
from pacekeeper.controller.api.auth.rbac import Principal, Role
from pacekeeper.controller.api.auth.tokens import TokenFile, authenticate_token
from pacekeeper.core.config.security import AccessConfig

_BEARER = "bearer"


class Authenticator:
    """The callers of one controller.

    Attributes:
        is_required: Whether callers must authenticate; otherwise each one is the open principal.
        accepts_tokens: Whether a token file is configured.
    """

    def __init__(
        self, *, is_required: bool, config: AccessConfig, tokens: TokenFile | None
    ) -> None:
        self.is_required = is_required
        self._config, self._tokens = config, tokens

    @property
    def accepts_tokens(self) -> bool:
        return self._tokens is not None

    def identify(self, identity: PeerIdentity) -> Principal:
        """The caller of a gRPC method: by its token, else by its certificate."""
        if not self.is_required:
            return self.open_principal(host_of(identity.peer))
        by_certificate = self._by_certificate(identity)
        if identity.authorization:
            return rbac.combine(self.by_header(identity.authorization[0]), by_certificate)
        return by_certificate or rbac.anonymous("neither a certificate nor a token was sent")

    def open_principal(self, host: str) -> Principal:
        """The caller from `host`, as `ipv4:192.0.2.1`, where no caller has to authenticate."""
        return Principal(name=f"open at {host.partition(':')[2] or host}", role=Role.OPEN)

    def by_header(self, header: str) -> Principal:
        """The caller that an authorization header names."""
        scheme, _, token = header.partition(" ")
        if self._tokens is not None and scheme.lower() != _BEARER:
            return rbac.anonymous("the authorization header is not a bearer token")
        return self.by_token(token.strip())

    def by_token(self, token: str) -> Principal:
        """The holder of a token."""
        if self._tokens is None:
            return rbac.anonymous("this controller accepts no tokens")
        return authenticate_token(token, self._tokens.records(), time.time())

    def is_token_valid(self, token_id: str) -> bool:
        """Whether a token is still in the file and has not expired."""
        records = self._tokens.records() if self._tokens is not None else ()
        found = (record for record in records if record.token_id == token_id)
        return any(time.time() < record.expires_unix_s for record in found)

    def _by_certificate(self, identity: PeerIdentity) -> Principal | None:
        if not identity.has_certificate:
            return None
        config = self._config
        return rbac.principal_of_certificate(
            identity.uris, identity.names, config.trust_domain, config.nodes_by_dns
        )
