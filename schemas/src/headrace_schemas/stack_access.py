"""Finds the token of a stack on this machine, so that commands and clients need not be given it.

`headrace up` keeps a random token in `run/token` below its data directory, for its owner alone. It is the password of
the embedded broker and, where nobody has set another, `security.internal_key`. It is used for the addresses that the
stack itself has written down in `run/state.json`, and for no others.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

USERNAME = "headrace"
_DEFAULT_DATA_DIR = ".headrace"
_TOKEN_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class BusLogin:
    """How to log in at a bus."""

    username: str
    password: str
    mechanism: str = "PLAIN"
    tls: bool = False
    ca_file: str = ""

    def __repr__(self) -> str:
        return f"BusLogin(username={self.username!r})"


_keys: dict[str, str] = {}
"""Internal keys of stacks that this process has started or looked up, by `host:port` of their services."""
_logins: dict[str, BusLogin] = {}
"""Logins by the bus address that programs use."""


def token_file(data_dir: Path) -> Path:
    return data_dir / "run" / "token"


def make_token(data_dir: Path) -> str:
    """Return the token of the stack in `data_dir`; a new one where there is none. The folder `run` has to exist."""
    path = token_file(data_dir)
    if token := read_token(data_dir):
        return token
    draft = path.with_name(f".token.{secrets.token_hex(8)}")
    token = secrets.token_urlsafe(32)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")
        file.flush()
        os.fsync(descriptor)
    draft.replace(path)
    return token


def read_token(data_dir: Path) -> str:
    """Return the token of the stack in `data_dir`, empty where there is none that this user keeps for itself alone."""
    try:
        with token_file(data_dir).open("rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.geteuid():
                return ""
            return file.read(_TOKEN_BYTES_MAX).decode("ascii", "replace").strip()
    except OSError:
        return ""


def remember_key(url: str, key: str) -> None:
    """Use `key` for the service at `url` in this process."""
    if key:
        _keys[_place(url)] = key


def remember_login(bus: str, login: BusLogin) -> None:
    """Use `login` for the bus at `bus` in this process."""
    if login.password:
        _logins[bus] = login


def remember_stack(data_dir: Path, state: dict[str, Any]) -> None:
    """Use the stack's token for the addresses that it has written down itself. `state` is its `run/state.json`."""
    token = read_token(data_dir)
    if token and state.get("token_is_key"):
        for service in state.get("services", {}).values():
            remember_key(service["url"], token)
    if token and state.get("token_is_password"):
        remember_login(state["bus"], BusLogin(USERNAME, token))


def key_for(url: str) -> str | None:
    """Return the internal key of the service at `url`, None where none is found.

    It is that of a stack of this process, then that of the environment, then that of the stack in the data directory.
    """
    if key := _keys.get(_place(url)):
        return key
    if key := _variable("SECURITY__INTERNAL_KEY"):
        return key
    _look()
    return _keys.get(_place(url))


def login_for(bus: str) -> BusLogin | None:
    """Return the login at `bus`, None where none is found. It is looked for as `key_for` does."""
    if login := _logins.get(bus):
        return login
    if password := _variable("BUS__PASSWORD"):
        return BusLogin(
            _variable("BUS__USERNAME") or USERNAME,
            password,
            _variable("BUS__MECHANISM") or "PLAIN",
            _variable("BUS__TLS").lower() == "true",
            _variable("BUS__CA_FILE"),
        )
    _look()
    return _logins.get(bus)


def _look() -> None:
    """Read what the stack in the data directory of the environment, or in `.headrace`, has written down."""
    data_dir = Path(_variable("DATA_DIR") or _DEFAULT_DATA_DIR)
    try:
        state = json.loads((data_dir / "run" / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(state, dict):
        remember_stack(data_dir, state)


def _variable(name: str) -> str:
    """Return a setting from the environment; one in TOML's quotes loses them."""
    text = os.environ.get(f"HEADRACE_{name}", "")
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def _place(url: str) -> str:
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:
        return ""
