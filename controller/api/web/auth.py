"""Who calls over HTTP is found out, judged by the same table as over gRPC and written down.

A browser logs in with a token and gets a cookie that scripts can not read and other sites can not
send; what acts must also say the session's secret, which only our own page knows. Programs show a
token in each request. Where nobody is asked (on loopback) the name of the host must be loopback's:
a page of another site can then neither read nor act under a name of its own.
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
from pacekeeper.controller.api.auth.rate_limit import Limit, RateLimiter
from pacekeeper.controller.api.auth.rbac import Action, Principal, Role
from pacekeeper.controller.api.auth.tokens import TokenFile, authenticate_token
from pacekeeper.core.addresses import is_loopback
from pacekeeper.core.config.security import LimitsConfig

LIFE_S = 12 * 3600.0


MOST_SESSIONS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """`token_id`: of the token that was shown, empty where nobody is asked; `secret`: what a form
    of our own page says, and no other page can know (CSRF).
    """

    caller: Principal
    token_id: str
    secret: str
    ends_s: float

    def knows(self, shown: str) -> bool:
        """Is that the secret? Says nothing of how near a guess was."""
        return hmac.compare_digest(self.secret.encode(), shown.encode("utf-8", "replace"))


@dataclass(slots=True, eq=False, kw_only=True)
class Sessions:
    """By the name in the cookie; the oldest go where there are too many."""

    _of: dict[str, Session] = field(default_factory=dict)

    def open(self, name: str, session: Session) -> None:
        """Somebody came."""
        self._of[name] = session
        while len(self._of) > MOST_SESSIONS:
            del self._of[next(iter(self._of))]

    def get(self, name: str, now_s: float) -> Session | None:
        """The session of this name, unless it is over."""
        session = self._of.get(name)
        if session is None or now_s < session.ends_s:
            return session
        del self._of[name]
        return None

    def close(self, name: str) -> None:
        """They left, or may not come any more."""
        self._of.pop(name, None)


LOGINS = Limit(per_s=0.2, at_once=10)  # of one address
MOST_BODY_BYTES = 16 << 10
CSRF_HEADER = "x-csrf-token"


class DeniedError(Exception):
    """The request is not answered; `status` and the text say why."""

    def __init__(self, status: int, text: str, *, goes_to: str = "") -> None:
        super().__init__(text)
        self.status, self.goes_to = status, goes_to


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """Who calls, and by which session; `cookie`: a session that just began, to be kept."""

    caller: Principal
    session: Session | None = None
    cookie: str = ""

    @property
    def may_act(self) -> bool:
        """Are there buttons for them?"""
        return rbac.authorise(self.caller, Action.ACT).is_allowed


class WebAuthenticator:
    """`asks`: whether callers must show a token; `is_secure`: whether it is all over TLS."""

    def __init__(
        self,
        *,
        asks: bool,
        is_secure: bool,
        tokens: TokenFile | None,
        limits: LimitsConfig,
        audit: AuditLog,
    ) -> None:
        self._asks, self._is_secure, self._tokens = asks, is_secure, tokens
        self._audit = audit
        self._sessions = Sessions()
        self._calls = RateLimiter(
            limit=Limit(per_s=limits.calls_per_s, at_once=limits.calls_at_once)
        )
        self._logins = RateLimiter(limit=LOGINS)
        # The prefix makes browsers insist on TLS, the whole host and no other's cookie.
        self._cookie = "__Host-pacekeeper" if is_secure else "pacekeeper"

    @property
    def asks(self) -> bool:
        """Must callers show a token?"""
        return self._asks

    def enter(self, request: Request, action: Action, about: str = "") -> Visitor:
        """Who may do that. Raises DeniedError; refusals are audited, acts before they are done."""
        visitor = self._visitor(request)
        caller, peer = visitor.caller, _peer(request)
        key = peer if caller.role in (Role.OPEN, Role.NOBODY) else caller.name
        verdict = rbac.authorise(caller, action)
        status, why = 403, verdict.reason
        if caller.role is Role.NOBODY:
            status = 401
        if verdict.is_allowed and not self._calls.is_granted(key, time.monotonic()):
            status, why = 429, f"{caller.name} asks too often"
        session = visitor.session if action is Action.ACT else None
        shown = request.headers.get(CSRF_HEADER, "")
        if not why and session is not None and not session.knows(shown):
            why = "the request does not come from our own page as it is now: load it again"
        what = f"{request.method} {request.url.path} {about}".strip()
        deed = AuditEvent(
            action=action,
            caller=caller.name,
            is_allowed=not why,
            peer=peer,
            about=f"web {what}",
            reason=why,
        )
        is_page = request.method == "GET" and "text/html" in request.headers.get("accept", "")
        if status == 401 and is_page and why:
            raise DeniedError(401, why, goes_to="/login")  # who only opens the page is no intruder
        is_noted = self._audit.note(deed) if why or action is Action.ACT else True
        if why:
            raise DeniedError(status, why)
        if not is_noted:
            raise DeniedError(503, "the audit log can not be written, and nothing is done unseen")
        return visitor

    def log_in(self, request: Request, token: str) -> Visitor:
        """A session for who shows this token. Raises DeniedError; audited either way."""
        peer = _peer(request)
        if not self._logins.is_granted(peer, time.monotonic()):
            raise self._refused(request, "login", 429, "too many logins from there: wait a minute")
        caller = self._by_token(token)
        verdict = rbac.authorise(caller, Action.READ)
        self._audit.note(
            AuditEvent(
                action="login",
                caller=caller.name,
                is_allowed=verdict.is_allowed,
                peer=peer,
                about="web",
                reason=verdict.reason,
            )
        )
        if not verdict.is_allowed:
            raise DeniedError(403, verdict.reason)
        return self._begun(caller, token.split(".")[1])

    def refuse_other_origin(self, request: Request, action: str) -> None:
        """Raises DeniedError: a form on a page of another site."""
        origin = request.headers.get("origin", "")
        try:
            netloc = urlsplit(origin).netloc
        except ValueError:
            netloc = ""
        if origin and netloc != request.headers.get("host", ""):
            why = "the request does not come from our own page"
            raise self._refused(request, action, 403, why)

    def log_out(self, request: Request) -> None:
        """The session of this request is over."""
        self._sessions.close(request.cookies.get(self._cookie, ""))

    def keep(self, visitor: Visitor, response: Response) -> Response:
        """Hand a session that just began to the browser."""
        if visitor.cookie:
            response.set_cookie(
                self._cookie,
                visitor.cookie,
                max_age=int(LIFE_S),
                path="/",
                secure=self._is_secure,
                httponly=True,
                samesite="strict",
            )
        return response

    def forget(self, response: Response) -> Response:
        """Take the cookie back."""
        response.delete_cookie(self._cookie, path="/", secure=self._is_secure, httponly=True)
        return response

    def _visitor(self, request: Request) -> Visitor:
        shown = request.headers.get("authorization", "")
        name = request.cookies.get(self._cookie, "")
        session = self._sessions.get(name, time.monotonic()) if name else None
        if not self._asks:
            if not _is_for_loopback(request):
                why = "call it 127.0.0.1 or localhost: this page is open on loopback only"
                raise self._refused(request, Action.READ, 421, why)
            if session is not None:
                return Visitor(caller=session.caller, session=session)
            return self._begun(
                Principal(name=f"{rbac.OPEN_AT}{_peer(request)}", role=Role.OPEN), ""
            )
        if shown:
            scheme, _, token = shown.partition(" ")
            if scheme.lower() != "bearer":
                return Visitor(caller=rbac.anonymous("what was shown is no bearer token"))
            return Visitor(caller=self._by_token(token.strip()))
        if session is None:
            return Visitor(caller=rbac.anonymous("nobody is logged in"))
        if not self._still_counts(session.token_id):
            self._sessions.close(name)
            return Visitor(caller=rbac.anonymous("the token has expired or was revoked"))
        return Visitor(caller=session.caller, session=session)

    def _refused(self, request: Request, action: str, status: int, why: str) -> DeniedError:
        """Written down, whoever it was."""
        peer, about = _peer(request), f"web {request.method} {request.url.path}"
        self._audit.note(
            AuditEvent(
                action=action,
                caller=Role.NOBODY,
                is_allowed=False,
                peer=peer,
                about=about,
                reason=why,
            )
        )
        return DeniedError(status, why)

    def _begun(self, caller: Principal, token_id: str) -> Visitor:
        session = Session(
            caller=caller,
            token_id=token_id,
            secret=secrets.token_urlsafe(32),
            ends_s=time.monotonic() + LIFE_S,
        )
        name = secrets.token_urlsafe(32)
        self._sessions.open(name, session)
        return Visitor(caller=caller, session=session, cookie=name)

    def _by_token(self, token: str) -> Principal:
        if self._tokens is None:
            return rbac.anonymous("no tokens are taken here")
        return authenticate_token(token, self._tokens.records(), time.time())

    def _still_counts(self, token_id: str) -> bool:
        records = self._tokens.records() if self._tokens is not None else ()
        found = (record for record in records if record.token_id == token_id)
        return any(time.time() < record.expires_unix_s for record in found)


def redirect(error: DeniedError) -> Response | None:
    """Where a browser is sent instead; None: nowhere."""
    return RedirectResponse(error.goes_to, status_code=303) if error.goes_to else None


def _peer(request: Request) -> str:
    return f"http:{request.client.host}" if request.client else "http:unknown"


def _is_for_loopback(request: Request) -> bool:
    """False: a name of another site that leads here (DNS rebinding)."""
    host = request.headers.get("host", "")
    try:
        return is_loopback(host if host.rpartition(":")[2].isdigit() else f"{host}:80")
    except ValueError:
        return False
