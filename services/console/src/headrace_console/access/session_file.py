"""File with the open sessions, so that a restart of the console ends none of them.

It contains digests of cookies, never a cookie, and only its owner can read it. A file that cannot be read or written
costs users a new login and nothing else.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.files import owner_alone, replace_file

log = get_logger(__name__)
_BYTES_MAX = 1_048_576


@dataclass(frozen=True, slots=True)
class Session:
    """A login. Role and tenants are those that the settings give the user of that name."""

    digest: str
    """SHA-256 of the cookie."""
    name: str
    token: str
    """SHA-256 that proves which token the user had. The session ends when the settings name another one."""
    ends_at_s: float
    """Civil time in seconds since 1970."""


_SESSIONS: TypeAdapter[list[Session]] = TypeAdapter(list[Session])


class SessionFile:
    """Sessions in `path`, which is replaced as a whole. Blocks for a few milliseconds."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[Session]:
        """Return the stored sessions, the oldest first."""
        try:
            with self._path.open("rb") as file:
                return _SESSIONS.validate_json(file.read(_BYTES_MAX))
        except FileNotFoundError:
            return []
        except (OSError, ValidationError) as error:
            log.warning("sessions_unreadable", path=str(self._path), error=type(error).__name__)
            return []

    def write(self, sessions: list[Session]) -> None:
        """Store the sessions."""
        content = json.dumps([asdict(session) for session in sessions]).encode("ascii")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self._path, content, opener=owner_alone)
        except OSError as error:
            log.warning("sessions_not_stored", path=str(self._path), error=str(error))
