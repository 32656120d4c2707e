"""Settings that the supervisor reads from file and environment of the services, and rendering of values as TOML.

A setting is looked up by name; only its service interprets it.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from datetime import date, time
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from headrace.errors import UsageError
from headrace_runtime.settings import table as settings_table
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.settings.table import CONFIG_VARIABLE, variable_of
from headrace_schemas.http.stack_access import BusLogin, login_for, remember_login


class Overrides:
    """Settings from the environment of the services and the settings file, with changes by the supervisor.

    Raises:
        SettingError: the settings file cannot be read.
    """

    def __init__(self, config: Path | None, settings: Mapping[str, object], environ: Mapping[str, str]) -> None:
        self.environ = dict(environ)
        config_file = config or (Path(environ[CONFIG_VARIABLE]) if environ.get(CONFIG_VARIABLE) else None)
        if config_file:
            self.environ[CONFIG_VARIABLE] = str(config_file.absolute())
        self._table = settings_table.read(config_file, environ)
        for name, value in settings.items():
            self.set(name, value)
        bus = self.get("bus.address")
        if bus and self.get("bus.password"):
            bus_settings = self.bus_settings(str(bus))
            password = bus_settings.password.get_secret_value()
            remember_login(
                bus_settings.address,
                BusLogin(
                    bus_settings.username, password, bus_settings.mechanism, bus_settings.tls, bus_settings.ca_file
                ),
            )

    def get(self, name: str) -> Any:
        """Return the value of a setting, or None if it is not set."""
        value: Any = self._table
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def bus_settings(self, address: str) -> BusSettings:
        """Return the settings for a connection to the bus at `address`, with the login that is stored for it."""
        table = self.get("bus")
        settings = BusSettings.model_validate({**(table if isinstance(table, dict) else {}), "address": address})
        login = None if settings.password.get_secret_value() else login_for(address)
        if login is None:
            return settings
        return settings.model_copy(update={"username": login.username, "password": SecretStr(login.password)})

    def set(self, name: str, value: object) -> None:
        """Set a setting for all services. For `bus.address`, also set the login that is stored for that bus."""
        variable = variable_of(name)
        self.environ[variable] = toml(value)
        settings_table.override(self._table, variable, self.environ[variable])
        if name == "bus.address" and not self.get("bus.password") and (login := login_for(str(value))):
            self.set("bus.username", login.username)
            self.set("bus.password", login.password)

    def default(self, name: str, value: object) -> None:
        """Set a setting for all services if it has no value yet."""
        if self.get(name) is None:
            self.set(name, value)


def parse_assignments(assignments: list[str]) -> dict[str, object]:
    """Parse `--set section.key=value` options. A value is TOML, otherwise text.

    Raises:
        UsageError: an option has no name or no value.
    """
    settings: dict[str, object] = {}
    for assignment in assignments:
        name, sign, value = (part.strip() for part in assignment.partition("="))
        if not sign or not name:
            raise UsageError(f"--set {assignment}: the form is section.key=value, for example gateway.port=8100")
        settings[name] = settings_table.value_of(name.rpartition(".")[2], value)
    return settings


_BARE = re.compile(r"[A-Za-z0-9_-]+")


def toml(value: object) -> str:
    """Return `value` as TOML on one line. Entries of a table that are None are left out, because TOML has no null.

    Raises:
        TypeError: TOML has no representation of the value.
    """
    if isinstance(value, Mapping):
        entries = {str(name): item for name, item in value.items() if item is not None}
        items = (f"{key(name)} = {toml(item)}" for name, item in entries.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, str | os.PathLike):
        return _quote(os.fspath(value))
    raise TypeError(f"{value!r}: TOML has no {type(value).__name__}")


def key(name: str) -> str:
    """Return a name in the form of a TOML key, with quotes if it needs them."""
    return name if _BARE.fullmatch(name) else _quote(name)


def _quote(text: str | bytes) -> str:
    """Return a basic TOML string, with the escapes of JSON and one for DEL, which TOML forbids as well."""
    decoded = text if isinstance(text, str) else os.fsdecode(text)
    return json.dumps(decoded, ensure_ascii=False).replace("\x7f", "\\u007f")
