"""Access control of the web page: sessions, CSRF protection, roles and limits; audited.

A browser logs in with a token and gets a cookie that scripts cannot read and other sites cannot
send. A request that acts must also carry the session's secret, which only our own page contains.
Programs send a token in each request. Where no caller has to authenticate (on loopback), the Host
header must name loopback, which prevents DNS rebinding.
"""

import hmac
import secrets
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from pacekeeper.controller.api.auth import rbac
from pacekeeper.controller.api.auth.audit_log import AuditEvent, AuditLog
from pacekeeper.controller.api.auth.authenticator import Authenticator
from pacekeeper.controller.api.auth.interceptor import NOT_AUDITED
from pacekeeper.controller.api.auth.rate_limit import Limit, RateLimiter
from pacekeeper.controller.api.auth.rbac import Action, Principal, Role
from pacekeeper.core.addresses import is_loopback
from pacekeeper.core.config.security import LimitsConfig

SESSION_S = 12 * 3600.0
MAX_SESSIONS = 4096
MAX_BODY_BYTES = 16 << 10
LOGINS = Limit(per_s=0.2, at_once=10)  # of one address
CSRF_HEADER = "x-csrf-token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A browser's session.

    Attributes:
        caller: The principal.
        token_id: The token of the login; empty where no caller has to authenticate.
        secret: The CSRF token, contained in our own pages only.
        ends_s: Monotonic time at which it expires.
    """

    caller: Principal
    token_id: str
    secret: str
    ends_s: float

    def has_secret(self, shown: str) -> bool:
        """Whether `shown` is the secret, compared in constant time."""
        return hmac.compare_digest(self.secret.encode(), shown.encode("utf-8", "replace"))


@dataclass(slots=True, eq=False, kw_only=True)
class Sessions:
    """Open sessions by the name in the cookie; the oldest are dropped beyond `MAX_SESSIONS`."""

    _of: dict[str, Session] = field(default_factory=dict)

    def open(self, name: str, session: Session) -> None:
        """Store a new session."""
        self._of[name] = session
        while len(self._of) > MAX_SESSIONS:
            del self._of[next(iter(self._of))]

    def get(self, name: str, now_s: float) -> Session | None:
        """The session of this name, unless it has expired."""
        session = self._of.get(name)
        if session is None or now_s < session.ends_s:
            return session
        del self._of[name]
        return None

    def close(self, name: str) -> None:
        """Forget a session."""
        self._of.pop(name, None)


class DeniedError(Exception):
    """A rejected request: an HTTP status, the reason, and a page to redirect a browser to."""

    def __init__(self, status: int, text: str, *, redirect_to: str = "") -> None:
        super().__init__(text)
        self.status, self.redirect_to = status, redirect_to


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """The caller of a request, its session, and the cookie of a session that just began."""

    caller: Principal
    session: Session | None = None
    cookie: str = ""

    @property
    def may_act(self) -> bool:
        """Whether the page shows buttons."""
        return rbac.authorise(self.caller, Action.ACT).is_allowed


class WebAuthenticator:
    """Access control of all HTTP requests of one controller."""

    def __init__(
        self,
        *,
        authenticator: Authenticator,
        is_secure: bool,
        limits: LimitsConfig,
        audit: AuditLog,
    ) -> None:
        """Create it.

        Args:
            authenticator: Identifies callers; the same as for gRPC.
            is_secure: Whether the page is served over TLS only.
            limits: Rates of requests.
            audit: Receives rejections, logins and actions.
        """
        self._authenticator, self._is_secure = authenticator, is_secure
        self._audit = audit
        self._sessions = Sessions()
        self._calls = RateLimiter(
            limit=Limit(per_s=limits.calls_per_s, at_once=limits.calls_at_once)
        )
        self._logins = RateLimiter(limit=LOGINS)
        # With this prefix browsers require TLS and accept the cookie from this host only.
        self._cookie = "__Host-pacekeeper" if is_secure else "pacekeeper"

    @property
    def is_required(self) -> bool:
        """Whether callers must log in."""
        return self._authenticator.accepts_tokens

    def admit(self, request: Request, action: Action, about: str = "") -> Visitor:
        """Admit a request.

        Rejections are audited; actions are audited before they are executed.

        Args:
            request: The request.
            action: What it asks for.
            about: The form, for the audit log.

        Raises:
            DeniedError: The caller may not do that, or not now.
        """
        visitor = self._visitor(request)
        caller, peer = visitor.caller, _peer(request)
        key = peer if caller.role in (Role.OPEN, Role.ANONYMOUS) else caller.name
        verdict = rbac.authorise(caller, action)
        status, why = 403, verdict.reason
        if caller.role is Role.ANONYMOUS:
            status = 401
        if verdict.is_allowed and not self._calls.is_granted(key, time.monotonic()):
            status, why = 429, f"{caller.name} sends too many requests"
        session = visitor.session if action is Action.ACT else None
        shown = request.headers.get(CSRF_HEADER, "")
        if not why and session is not None and not session.has_secret(shown):
            why = "the request does not come from the current page: reload it"
        what = f"{request.method} {request.url.path} {about}".strip()
        event = AuditEvent(
            action=action,
            principal=caller,
            is_allowed=not why,
            peer=peer,
            about=f"web {what}",
            reason=why,
        )
        is_page = request.method == "GET" and "text/html" in request.headers.get("accept", "")
        if status == 401 and is_page and why:
            raise DeniedError(401, why, redirect_to="/login")  # opening the page is not audited
        is_noted = self._audit.note(event) if why or action is Action.ACT else True
        if why:
            raise DeniedError(status, why)
        if not is_noted:
            raise DeniedError(503, NOT_AUDITED)
        return visitor

    def log_in(self, request: Request, token: str) -> Visitor:
        """Begin a session for the holder of a token; audited either way. Raises DeniedError."""
        peer = _peer(request)
        if not self._logins.is_granted(peer, time.monotonic()):
            raise self._rejected(
                request, "login", 429, "too many logins from this address: wait a minute"
            )
        caller = self._authenticator.by_token(token)
        verdict = rbac.authorise(caller, Action.READ)
        self._audit.note(
            AuditEvent(
                action="login",
                principal=caller,
                is_allowed=verdict.is_allowed,
                peer=peer,
                about="web",
                reason=verdict.reason,
            )
        )
        if not verdict.is_allowed:
            raise DeniedError(403, verdict.reason)
        return self._begin_session(caller, token.split(".")[1])

    def check_origin(self, request: Request, action: str) -> None:
        """Raises DeniedError for a form on a page of another site."""
        origin = request.headers.get("origin", "")
        try:
            netloc = urlsplit(origin).netloc
        except ValueError:
            netloc = ""
        if origin and netloc != request.headers.get("host", ""):
            why = "the request comes from a page of another site"
            raise self._rejected(request, action, 403, why)

    def log_out(self, request: Request) -> None:
        """End the session of a request."""
        self._sessions.close(request.cookies.get(self._cookie, ""))

    def set_cookie(self, visitor: Visitor, response: Response) -> Response:
        """Add the cookie of a session that just began to a response."""
        if visitor.cookie:
            response.set_cookie(
                self._cookie,
                visitor.cookie,
                max_age=int(SESSION_S),
                path="/",
                secure=self._is_secure,
                httponly=True,
                samesite="strict",
            )
        return response

    def delete_cookie(self, response: Response) -> Response:
        """Remove the cookie from the browser."""
        response.delete_cookie(self._cookie, path="/", secure=self._is_secure, httponly=True)
        return response

    def _visitor(self, request: Request) -> Visitor:
        shown = request.headers.get("authorization", "")
        name = request.cookies.get(self._cookie, "")
        session = self._sessions.get(name, time.monotonic()) if name else None
        if not self.is_required:
            if not _is_for_loopback(request):
                why = "use 127.0.0.1 or localhost: without login the page answers on loopback only"
                raise self._rejected(request, Action.READ, 421, why)
            if session is not None:
                return Visitor(caller=session.caller, session=session)
            return self._begin_session(self._authenticator.open_principal(_peer(request)), "")
        if shown:
            return Visitor(caller=self._authenticator.by_header(shown))
        if session is None:
            return Visitor(caller=rbac.anonymous("the request has no session"))
        if not self._authenticator.is_token_valid(session.token_id):
            self._sessions.close(name)
            return Visitor(caller=rbac.anonymous("the token has expired or was revoked"))
        return Visitor(caller=session.caller, session=session)

    def _rejected(self, request: Request, action: str, status: int, why: str) -> DeniedError:
        """Audit a rejection before the caller is identified."""
        peer, about = _peer(request), f"web {request.method} {request.url.path}"
        self._audit.note(
            AuditEvent(
                action=action,
                principal=rbac.anonymous(why),
                is_allowed=False,
                peer=peer,
                about=about,
                reason=why,
            )
        )
        return DeniedError(status, why)

    def _begin_session(self, caller: Principal, token_id: str) -> Visitor:
        session = Session(
            caller=caller,
            token_id=token_id,
            secret=secrets.token_urlsafe(32),
            ends_s=time.monotonic() + SESSION_S,
        )
        name = secrets.token_urlsafe(32)
        self._sessions.open(name, session)
        return Visitor(caller=caller, session=session, cookie=name)


def redirect(error: DeniedError) -> Response | None:
    """The redirection for a rejected request; None: there is none."""
    return RedirectResponse(error.redirect_to, status_code=303) if error.redirect_to else None


def _peer(request: Request) -> str:
    return f"http:{request.client.host}" if request.client else "http:unknown"


def _is_for_loopback(request: Request) -> bool:
    """Whether the Host header names loopback."""
    host = request.headers.get("host", "")
    try:
        return is_loopback(host if host.rpartition(":")[2].isdigit() else f"{host}:80")
    except ValueError:
        return False
