"""Logins with one-time tokens and tokens of users, and the sessions that they begin.

A session is a random cookie of which only the digest is kept. Sessions end with the process.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path

from headrace_console.metrics import LOGINS
from headrace_console.settings import UserSettings
from headrace_console.users import Role, Scope, User
from headrace_runtime.clock import Clock
from headrace_runtime.errors import Refused
from headrace_schemas.http.stack_access import take_login_token

SESSION_S = 12 * 3600
_SESSIONS_MAX = 1000
_ATTEMPTS_MAX, _ATTEMPTS_S = 10, 60.0
OWNER = "owner"
"""Name of the user who logs in with the token that `headrace up` prints."""


@dataclass(frozen=True, slots=True)
class _Session:
    name: str
    role: Role
    scope: Scope
    ends_s: float


class Logins:
    """Open sessions of the console, at most 1,000. The oldest one ends when another begins."""

    def __init__(self, data_dir: Path, users: tuple[UserSettings, ...], clock: Clock) -> None:
        self._data_dir = data_dir
        self._users = users
        self._clock = clock
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()
        self._attempts: deque[float] = deque(maxlen=_ATTEMPTS_MAX)

    def log_in_once(self, token: str) -> str:
        """Use the one-time token of the stack's owner up, and return the cookie of a new session.

        Raises:
            Refused: the token is wrong or used (401), or there were too many logins (429).
        """
        self._count_attempt()
        if not take_login_token(self._data_dir, token):
            LOGINS.labels("refused").inc()
            raise Refused(
                401,
                "wrong_token",
                "this address was used already, or a newer one was printed; print one with `headrace console`",
            )
        return self._begin(OWNER, "operator", Scope())

    def log_in(self, token: str) -> str:
        """Check a user's token, and return the cookie of a new session. Raises `Refused` as `log_in_once`."""
        self._count_attempt()
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
        matches = [user for user in self._users if hmac.compare_digest(user.sha256, digest)]
        if not matches:
            LOGINS.labels("refused").inc()
            raise Refused(401, "wrong_token", "no user has this token; check it, and console.users", "token")
        user = matches[0]
        return self._begin(user.name, user.role, Scope(frozenset(user.tenants) if user.tenants else None))

    def log_out(self, cookie: str) -> None:
        """End a session."""
        self._sessions.pop(_digest(cookie), None)

    def user_of(self, cookie: str | None) -> User | None:
        """Return the user of a session that has not ended."""
        if not cookie:
            return None
        session = self._sessions.get(_digest(cookie))
        if session is None:
            return None
        if session.ends_s <= self._clock.monotonic_s():
            self.log_out(cookie)
            return None
        form_token = hashlib.sha256(b"headrace console form\0" + cookie.encode()).hexdigest()
        return User(session.name, session.role, session.scope, form_token)

    def _begin(self, name: str, role: Role, scope: Scope) -> str:
        LOGINS.labels("accepted").inc()
        cookie = secrets.token_urlsafe(32)
        self._sessions[_digest(cookie)] = _Session(name, role, scope, self._clock.monotonic_s() + SESSION_S)
        if len(self._sessions) > _SESSIONS_MAX:
            self._sessions.popitem(last=False)
        return cookie

    def _count_attempt(self) -> None:
        """Raise `Refused` 429 for the 11th login within a minute."""
        now_s = self._clock.monotonic_s()
        if len(self._attempts) == _ATTEMPTS_MAX and now_s - self._attempts[0] < _ATTEMPTS_S:
            LOGINS.labels("limited").inc()
            raise Refused(429, "too_many_logins", "there were 10 logins within a minute; wait a minute and try again")
        self._attempts.append(now_s)


def _digest(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode("utf-8", "surrogatepass")).digest()
