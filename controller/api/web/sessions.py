"""Who is logged in at the web page: sessions, bounded in number and time. Pure; time is told."""

import hmac
from dataclasses import dataclass, field

from pacekeeper.controller.api.auth.rbac import Caller

LIFE_S = 12 * 3600.0
MOST_SESSIONS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """`token_id`: of the token that was shown, empty where nobody is asked; `secret`: what a form
    of our own page says, and no other page can know (CSRF).
    """

    caller: Caller
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
