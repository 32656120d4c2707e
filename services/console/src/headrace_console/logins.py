"""Logins with the one-time token of the stack's owner or with the token of a user, and the sessions that they begin.

A session is a random cookie. Only its digest is stored, in a file, so that sessions survive a restart. A new token in
the settings ends the sessions of its user, and a new internal key of the stack ends those of the owner. Only the owner
of the process can read the file. If the file cannot be read or written, users must log in again.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections import Counter, OrderedDict, deque
from dataclasses import asdict, dataclass
from ipaddress import IPv6Network, ip_address
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from headrace_console.metrics import LOGINS
from headrace_console.settings import Role, Scope, User, UserSettings
from headrace_runtime.clock import Clock
from headrace_runtime.errors import Refused
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.disk import open_for_owner, replace_file
from headrace_schemas.http.stack_access import take_login_token

log = get_logger(__name__)
SESSION_S = 12 * 3600
_SESSIONS_MAX = 200
_ATTEMPTS_MAX, _ATTEMPTS_S = 10, 60.0
_ADDRESSES_MAX = 1000
"""Largest number of addresses whose logins are counted. Those that logged in last are remembered."""
_ROUNDING_S = 1.0
OWNER = "owner"
"""Name of the user who logs in with the token that `headrace up` prints."""
_FILE_BYTES_MAX = 1_048_576


@dataclass(frozen=True, slots=True)
class Session:
    """A login. The user's role and tenants are not stored: they are read from the settings by the user's name."""

    digest: str
    """SHA-256 of the cookie."""
    name: str
    token: str
    """SHA-256 of the token with which the user logged in. The session ends when the settings have another one."""
    ends_at_s: float
    """Unix time in seconds."""


_SESSIONS: TypeAdapter[list[Session]] = TypeAdapter(list[Session])


def _read_sessions(path: Path) -> list[Session]:
    """Return the stored sessions, the oldest first. It blocks for a few milliseconds."""
    try:
        with path.open("rb") as file:
            return _SESSIONS.validate_json(file.read(_FILE_BYTES_MAX))
    except FileNotFoundError:
        return []
    except (OSError, ValidationError) as error:
        log.warning("sessions_unreadable", path=str(path), error=type(error).__name__)
        return []


class Logins:
    """Open sessions of the console, at most 200. When another begins, the oldest one of the user with the most ends, so
    that no user can end the sessions of another one.
    """

    def __init__(self, data_dir: Path, users: tuple[UserSettings, ...], clock: Clock, *, stack_key: str = "") -> None:
        self._data_dir = data_dir
        self._users = {user.name: user for user in users}
        self._clock = clock
        self._owner_token = _digest(f"headrace console owner\0{stack_key}")
        self._path = data_dir / "console" / "sessions.json"
        stored = [session for session in _read_sessions(self._path) if self._rights(session) is not None][
            -_SESSIONS_MAX:
        ]
        self._sessions = OrderedDict((session.digest, session) for session in stored)
        self._attempts: OrderedDict[str, deque[float]] = OrderedDict()
        """Times of the last logins by the address of the client."""

    def log_in_once(self, token: str, address: str = "") -> str:
        """Redeem the one-time token of the stack's owner, and return the cookie of a new session.

        Args:
            token: the token.
            address: address of the client. Nobody can keep clients of other addresses from logging in.

        Raises:
            Refused: the token is wrong or used (401), or there were too many logins (429).
        """
        self._count_attempt(address)
        if not take_login_token(self._data_dir, token):
            LOGINS.labels("refused").inc()
            raise Refused(
                401,
                "wrong_token",
                "this address was used already, or a newer one was printed; print one with `headrace console`",
            )
        return self._begin(OWNER, self._owner_token)

    def log_in(self, token: str, address: str = "") -> str:
        """Check a user's token, and return the cookie of a new session. Raises `Refused` as `log_in_once`."""
        self._count_attempt(address)
        digest = _digest(token)
        matches = [user for user in self._users.values() if hmac.compare_digest(user.sha256, digest)]
        if not matches:
            LOGINS.labels("refused").inc()
            raise Refused(401, "wrong_token", "no user has this token; check it, and console.users", "token")
        return self._begin(matches[0].name, matches[0].sha256)

    def log_out(self, cookie: str) -> None:
        """End a session."""
        if self._sessions.pop(_digest(cookie), None) is not None:
            self._write_sessions()

    def user_of(self, cookie: str | None) -> User | None:
        """Return the user of the session with this cookie, or None if there is no such session or it has ended."""
        if not cookie:
            return None
        session = self._sessions.get(_digest(cookie))
        if session is None:
            return None
        rights = self._rights(session)
        if rights is None:
            self.log_out(cookie)
            return None
        form_token = hashlib.sha256(b"headrace console form\0" + cookie.encode()).hexdigest()
        return User(session.name, *rights, form_token)

    def _rights(self, session: Session) -> tuple[Role, Scope] | None:
        """Return the rights of a session, or None if it has ended or its user has another token by now."""
        left_s = session.ends_at_s - self._clock.now().timestamp()
        if not 0 < left_s <= SESSION_S + _ROUNDING_S:
            return None
        if (session.name, session.token) == (OWNER, self._owner_token):
            return "operator", Scope()
        user = self._users.get(session.name)
        if user is None or user.sha256 != session.token:
            return None
        return user.role, Scope(frozenset(user.tenants) if user.tenants else None)

    def _begin(self, name: str, token: str) -> str:
        LOGINS.labels("accepted").inc()
        cookie = secrets.token_urlsafe(32)
        session = Session(_digest(cookie), name, token, self._clock.now().timestamp() + SESSION_S)
        self._sessions[session.digest] = session
        if len(self._sessions) > _SESSIONS_MAX:
            sessions_of = Counter(open_session.name for open_session in self._sessions.values())
            most = max(sessions_of.values())
            oldest = next(key for key, entry in self._sessions.items() if sessions_of[entry.name] == most)
            del self._sessions[oldest]
        self._write_sessions()
        return cookie

    def _write_sessions(self) -> None:
        """Replace the stored sessions. It blocks for a few milliseconds. A failure is logged."""
        content = json.dumps([asdict(session) for session in self._sessions.values()]).encode("ascii")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self._path, content, opener=open_for_owner)
        except OSError as error:
            log.warning("sessions_not_stored", path=str(self._path), error=str(error))

    def _count_attempt(self, address: str) -> None:
        """Raise `Refused` 429 for the 11th login of an address within a minute."""
        now_s, network = self._clock.monotonic_s(), _network_of(address)
        attempts = self._attempts.pop(network, None) or deque(maxlen=_ATTEMPTS_MAX)
        self._attempts[network] = attempts
        if len(self._attempts) > _ADDRESSES_MAX:
            self._attempts.popitem(last=False)
        if len(attempts) == _ATTEMPTS_MAX and now_s - attempts[0] < _ATTEMPTS_S:
            LOGINS.labels("limited").inc()
            raise Refused(429, "too_many_logins", "there were 10 logins within a minute; wait a minute and try again")
        attempts.append(now_s)


def _network_of(address: str) -> str:
    """Return an IPv4 address, or the network of an IPv6 address, in which a client may choose any address."""
    try:
        parsed = ip_address(address)
    except ValueError:  # for example of a Unix socket
        return address
    if parsed.version == 4 or parsed.ipv4_mapped is not None:
        return address
    return str(IPv6Network((int(parsed), 64), strict=False))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
