"""Who a connection is: nobody, until it has sent the user name and the password of the bus (SASL PLAIN, RFC 4616)."""

from __future__ import annotations

import hmac
from dataclasses import dataclass

MECHANISM = "PLAIN"


@dataclass(frozen=True, slots=True)
class Credentials:
    """User name and password that clients have to send; without a password anybody may do anything."""

    username: str = ""
    password: str = ""

    def match(self, message: bytes) -> bool:
        """Return whether a PLAIN message has them: `[identity] NUL username NUL password`."""
        parts = message.split(b"\0")
        if len(parts) != 3:
            return False
        username = hmac.compare_digest(parts[1], self.username.encode())
        return hmac.compare_digest(parts[2], self.password.encode()) and username


class Login:
    """The authentication of one connection."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self.done = not credentials.password
        """The connection may send requests of every kind."""
        self.refused = False
        """The connection sent something wrong and is to be closed."""
        self.agreed = False
        """The mechanism was agreed on."""

    def authenticate(self, message: bytes) -> bool:
        """Return whether the message is accepted. Where no password is asked for, any is."""
        self.done = self.done or self._credentials.match(message)
        self.refused = not self.done
        return self.done
