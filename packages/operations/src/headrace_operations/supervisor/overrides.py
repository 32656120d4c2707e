"""The settings that the supervisor has to know, from the file and the environment that services read.

The meaning of a setting is its service's business; here they are looked up by name only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from headrace.errors import UsageError
from headrace_operations.toml_text import toml
from headrace_runtime import settings_table
from headrace_runtime.settings import BusSettings
from headrace_runtime.settings_table import CONFIG_VARIABLE, variable_of
from headrace_schemas.stack_access import BusLogin, login_for, remember_login


class Overrides:
    """`environ` for the services, with the settings that were given by name in it, and `get` to look one up.

    Raises `SettingError` for a file that cannot be read.
    """

    def __init__(self, config: Path | None, settings: Mapping[str, object], environ: Mapping[str, str]) -> None:
        self.environ = dict(environ)
        named = config or (Path(environ[CONFIG_VARIABLE]) if environ.get(CONFIG_VARIABLE) else None)
        if named:
            self.environ[CONFIG_VARIABLE] = str(named.absolute())
        self._table = settings_table.read(named, environ)
        for name, value in settings.items():
            self.set(name, value)
        bus = self.get("bus.address")
        if bus and self.get("bus.password"):
            found = self.bus_settings(str(bus))
            password = found.password.get_secret_value()
            remember_login(found.address, BusLogin(found.username, password, found.mechanism, found.tls, found.ca_file))

    def get(self, name: str) -> Any:
        """The setting's value, None when it was left to its default."""
        found: Any = self._table
        for part in name.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found

    def bus_settings(self, address: str) -> BusSettings:
        """Return the settings of the bus at `address`, with the login that is known for it."""
        table = self.get("bus")
        found = BusSettings.model_validate({**(table if isinstance(table, dict) else {}), "address": address})
        login = None if found.password.get_secret_value() else login_for(address)
        if login is None:
            return found
        return found.model_copy(update={"username": login.username, "password": SecretStr(login.password)})

    def set(self, name: str, value: object) -> None:
        """Decide a setting for all services. A bus comes with the login that is known for it."""
        variable = variable_of(name)
        self.environ[variable] = toml(value)
        settings_table.override(self._table, variable, self.environ[variable])
        if name == "bus.address" and not self.get("bus.password") and (login := login_for(str(value))):
            self.set("bus.username", login.username)
            self.set("bus.password", login.password)

    def default(self, name: str, value: object) -> None:
        """Decide a setting that nobody has decided."""
        if self.get(name) is None:
            self.set(name, value)


def parse_assignments(assignments: list[str]) -> dict[str, object]:
    """`--set section.key=value` as settings: a value is TOML, or text as it stands. Raises `UsageError`."""
    found: dict[str, object] = {}
    for assignment in assignments:
        name, sign, value = (part.strip() for part in assignment.partition("="))
        if not sign or not name:
            raise UsageError(f"--set {assignment}: write section.key=value, e.g. --set gateway.port=8100")
        found[name] = settings_table.value_of(name.rpartition(".")[2], value)
    return found
