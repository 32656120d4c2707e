"""Discovery of the token of a stack on this machine, so that users need not pass it to commands and clients.

`headrace up` stores a random token in `run/token` of its data directory, readable by its owner alone. The token is the
password of the embedded broker and the default of `security.internal_key`. It is only sent to the addresses that the
stack has recorded in `run/state.json`.
"""

from __future__ import annotations

import hmac
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
    """Credentials and transport settings for the login at a Kafka cluster."""

    username: str
    password: str
    mechanism: str = "PLAIN"
    tls: bool = False
    ca_file: str = ""

    def __repr__(self) -> str:
        return f"BusLogin(username={self.username!r})"


_keys: dict[str, str] = {}
"""Internal keys of stacks that this process has started or discovered, by `host:port` of their services."""
_logins: dict[str, BusLogin] = {}
"""Logins by the bus address that clients use."""


def token_file(data_dir: Path) -> Path:
    """Return the path of the token file."""
    return data_dir / "run" / "token"


def make_token(data_dir: Path) -> str:
    """Return the secret token of the Headrace in `data_dir`; create it at the first call. The folder `run` must
    exist.
    """
    return read_token(data_dir) or _write_token(token_file(data_dir))


def read_token(data_dir: Path) -> str:
    """Return the token of the stack in `data_dir`, or an empty string.

    A token file that another user owns or can read is ignored.
    """
    return _read_token(token_file(data_dir))


def make_login_token(data_dir: Path) -> str:
    """Return a new token with which the owner of the stack can log in to the console once. It replaces an earlier one.

    The folder `run` must exist.
    """
    return _write_token(_login_file(data_dir))


def take_login_token(data_dir: Path, token: str) -> bool:
    """Return whether `token` is the stored login token. If it is, delete the stored one, so that it is valid once."""
    path = _login_file(data_dir)
    expected = _read_token(path)
    if not expected or not hmac.compare_digest(expected.encode(), token.encode("utf-8", "surrogatepass")):
        return False
    try:
        path.unlink()
    except FileNotFoundError:  # another request took it meanwhile
        return False
    return True


def _login_file(data_dir: Path) -> Path:
    return data_dir / "run" / "console-login"


def _write_token(path: Path) -> str:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    token = secrets.token_urlsafe(32)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")
        file.flush()
        os.fsync(descriptor)
    draft.replace(path)
    return token


def _read_token(path: Path) -> str:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077 or status.st_uid != os.geteuid():
                return ""
            return file.read(_TOKEN_BYTES_MAX).decode("ascii", "replace").strip()
    except OSError:
        return ""


def remember_key(url: str, key: str) -> None:
    """Remember the internal key for this process's requests to the service at `url`."""
    if key:
        _keys[_host_and_port(url)] = key


def remember_login(bus: str, login: BusLogin) -> None:
    """Remember the login for this process's connections to the bus at `bus`."""
    if login.password:
        _logins[bus] = login


def remember_stack(data_dir: Path, state: dict[str, Any]) -> None:
    """Remember the stack's token as key and password for the addresses in `state` (its `run/state.json`)."""
    token = read_token(data_dir)
    if token and state.get("token_is_key"):
        for service in state.get("services", {}).values():
            remember_key(service["url"], token)
    if token and state.get("token_is_password"):
        remember_login(state["bus"], BusLogin(USERNAME, token))


def key_for(url: str) -> str | None:
    """Return the internal key of the service at `url`, or None if it is unknown.

    The key of a stack of this process has precedence over that of the environment, and that one over the token in the
    data directory.
    """
    if key := _keys.get(_host_and_port(url)):
        return key
    if key := _variable("SECURITY__INTERNAL_KEY"):
        return key
    _discover_stack()
    return _keys.get(_host_and_port(url))


def login_for(bus: str) -> BusLogin | None:
    """Return the login for `bus`, or None if it is unknown. The precedence is that of `key_for`."""
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
    _discover_stack()
    return _logins.get(bus)


def _discover_stack() -> None:
    """Read the token of the stack on this machine from its data directory, and keep it in memory for later requests.

    The data directory is `HEADRACE_DATA_DIR`, by default `.headrace`. Without a stack in it, nothing changes.
    """
    data_dir = Path(_variable("DATA_DIR") or _DEFAULT_DATA_DIR)
    try:
        state = json.loads((data_dir / "run" / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(state, dict):
        remember_stack(data_dir, state)


def _variable(name: str) -> str:
    """Return a setting from the environment, without the quotes of TOML."""
    text = os.environ.get(f"HEADRACE_{name}", "")
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def _host_and_port(url: str) -> str:
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:
        return ""
