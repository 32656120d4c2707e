"""The settings as a table of names: a TOML file, overridden by the environment. Sections check the values.

`HEADRACE_GATEWAY__PORT=8100` overrides `gateway.port`. Services read it through `settings`; the supervisor, which has
to know a few settings of others, looks them up here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_runtime.errors import SettingError
from headrace_schemas.redaction import is_secret

ENV_PREFIX = "HEADRACE_"
CONFIG_VARIABLE = "HEADRACE_CONFIG"
COMMAND_VARIABLES = frozenset({CONFIG_VARIABLE, "HEADRACE_WHO"})
"""Options of the command `headrace`, and no settings: whoever exports one can start services all the same."""


def read(path: Path | None, environ: Mapping[str, str]) -> dict[str, Any]:
    """The file (none: empty) and whatever the environment sets. Raises `SettingError`."""
    table = _file(path) if path else {}
    for variable, text in environ.items():
        if variable.startswith(ENV_PREFIX) and variable not in COMMAND_VARIABLES:
            override(table, variable, text)
    return table


def override(table: dict[str, Any], variable: str, text: str) -> None:
    """Set what an environment variable means."""
    path = variable.removeprefix(ENV_PREFIX).lower().split("__")
    value = value_of(path[-1], text)
    inner = table
    for part in path[:-1]:
        inner = inner.setdefault(part, {})
        if not isinstance(inner, dict):
            raise SettingError(variable, text, f"{part!r} is a plain value, not a section")
    inner[path[-1]] = value


def variable_of(name: str) -> str:
    """The environment variable that sets `name`."""
    return ENV_PREFIX + name.upper().replace(".", "__")


def value_of(name: str, text: str) -> Any:
    """TOML, or the text as it stands: always for a secret, which may consist of digits."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if is_secret(name) and not isinstance(value, str) else value


def _file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError("config", str(path), f"cannot be read: {error.strerror}; name an existing file") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingError("config", str(path), f"is not valid TOML: {error}") from None
