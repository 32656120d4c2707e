"""What the settings will be, as far as a supervisor has to know: the file and the environment that services read.

The meaning of a setting is its service's business; here they are looked up by name only.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import UsageError

PREFIX = "HEADRACE_"
CONFIG_VARIABLE = "HEADRACE_CONFIG"


class Overrides:
    """`environ` for the services, with the settings that were given by name in it, and `get` to look one up."""

    def __init__(self, config: Path | None, settings: Mapping[str, object], environ: Mapping[str, str]) -> None:
        self.environ = dict(environ)
        named = config or (Path(environ[CONFIG_VARIABLE]) if environ.get(CONFIG_VARIABLE) else None)
        self._file = _read(named) if named else {}
        if named:
            self.environ[CONFIG_VARIABLE] = str(named.absolute())
        for name, value in settings.items():
            self.environ[_variable(name)] = _text(value)

    def get(self, name: str) -> Any:
        """The setting's value, None when it was left to its default."""
        text = self.environ.get(_variable(name))
        if text is not None:
            return _value(text)
        found: Any = self._file
        for part in name.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found

    def set(self, name: str, value: object) -> None:
        """Decide a setting for all services."""
        self.environ[_variable(name)] = _text(value)

    def default(self, name: str, value: object) -> None:
        """Decide a setting that nobody has decided."""
        if self.get(name) is None:
            self.set(name, value)


def parse_assignments(assignments: list[str]) -> dict[str, object]:
    """`--set section.key=value` as settings: a value is TOML, or text as it stands. Raises `UsageError`."""
    found: dict[str, object] = {}
    for assignment in assignments:
        name, sign, value = assignment.partition("=")
        if not sign or not name.strip():
            raise UsageError(f"--set {assignment}: write section.key=value, e.g. --set gateway.port=8100")
        found[name.strip()] = _value(value.strip())
    return found


def _variable(name: str) -> str:
    return PREFIX + name.upper().replace(".", "__")


def _text(value: object) -> str:
    """TOML for a value; JSON is the same for what settings are made of, tables apart, which it is not."""
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{json.dumps(str(key), ensure_ascii=False)} = {_text(item)}" for key, item in value.items())
            + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    return json.dumps(str(value) if isinstance(value, os.PathLike) else value, ensure_ascii=False)


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"settings file {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"settings file {path} is not valid TOML: {error}") from None
