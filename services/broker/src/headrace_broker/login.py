"""Authentication of connections by the user name and the password of the bus (SASL PLAIN, RFC 4616)."""

from __future__ import annotations

import hmac
from dataclasses import dataclass

MECHANISM = "PLAIN"


@dataclass(frozen=True, slots=True)
class Credentials:
    """User name and password that clients must send. Without a password all clients are accepted."""

    username: str = ""
    password: str = ""

    def match(self, message: bytes) -> bool:
        """Return whether a PLAIN message, `[identity] NUL username NUL password`, has these credentials."""
        parts = message.split(b"\0")
        if len(parts) != 3:
            return False
        username = hmac.compare_digest(parts[1], self.username.encode())
        return hmac.compare_digest(parts[2], self.password.encode()) and username


class Login:
    """State of authentication of one connection."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self.done = not credentials.password
        """Whether the connection may send all requests."""
        self.refused = False
        """Whether the authentication failed, so that the connection must be closed."""
        self.agreed = False
        """Whether the client has chosen the mechanism."""

    def authenticate(self, message: bytes) -> bool:
        """Check the client's PLAIN message, and return whether it is accepted. Without a password every message is."""
        self.done = self.done or self._credentials.match(message)
        self.refused = not self.done
        return self.done
