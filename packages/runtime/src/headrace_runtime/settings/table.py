"""Settings as a plain dictionary, read from a TOML file and overridden by environment variables, before sections
validate them.

`HEADRACE_GATEWAY__PORT=8100` overrides `gateway.port`. Services use the table through `settings`. The supervisor, which
needs a few settings of the services, reads them from the table.
"""

from __future__ import annotations

import errno
import math
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from headrace_runtime.errors import SettingError
from headrace_schemas.values.errors import is_secret
from headrace_schemas.values.text import closest, decode_text, is_storable

_INTEGER_MAX = 2**63 - 1
_DURATION = re.compile(r"(?<!_per)_s$")
"""End of the name of a setting in seconds, as opposed to a rate."""
_SECONDS_MAX = 3_153_600_000
"""Largest duration. Dates with a longer one added or subtracted would end a service when it computes them."""
_FILE_BYTES_MAX = 8 << 20
"""Maximum size of a TOML file in bytes. A file with 10,000 keys has 2 MB."""
ENV_PREFIX = "HEADRACE_"
CONFIG_VARIABLE = "HEADRACE_CONFIG"
COMMAND_VARIABLES = frozenset({CONFIG_VARIABLE, "HEADRACE_WHO"})
"""Variables that are options of the command `headrace`. Services ignore them, so exporting them does no harm."""


def read(path: Path | None, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings as a table: those of the file `path` (none for None), overridden by those of the environment.

    Raises:
        SettingError: the file cannot be read, or a value is invalid.
    """
    table = _file(path) if path else {}
    for variable, text in environ.items():
        if variable.startswith(ENV_PREFIX) and variable not in COMMAND_VARIABLES:
            override(table, variable, text)
    check_plain(table)
    return table


def override(table: dict[str, Any], variable: str, text: str) -> None:
    """Set the value `text` of an environment variable in `table`, at the path that the variable's name denotes."""
    path = variable.removeprefix(ENV_PREFIX).lower().split("__")
    value = value_of(path[-1], text)
    inner = table
    for part in path[:-1]:
        inner = inner.setdefault(part, {})
        if not isinstance(inner, dict):
            raise SettingError(variable, text, f"{part!r} is a plain value, not a section")
    inner[path[-1]] = value


def variable_of(name: str) -> str:
    """Return the name of the environment variable that sets the setting `name`."""
    return ENV_PREFIX + name.upper().replace(".", "__")


def value_of(name: str, text: str) -> Any:
    """Parse the value of a setting as TOML. Text that is not TOML is returned unchanged, and so is the value of a
    secret, which may consist of digits."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
    return text if is_secret(name) and not isinstance(value, str) else value


def parse_toml(content: bytes) -> dict[str, Any]:
    """Parse the content of a TOML file, with or without a byte order mark.

    Raises:
        ValueError: the content has another encoding or is not TOML. The message is a sentence without its subject.
    """
    text = decode_text(content)
    try:
        return tomllib.loads(text.replace("\r\n", "\n"))
    except RecursionError:
        raise ValueError("is not valid TOML: its values are nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not valid TOML: {error}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Read and parse a TOML file that a user has named, such as a settings file.

    Pipes and devices are refused, because reading them could block for ever or fill the memory.

    Raises:
        OSError: the file cannot be read, is no regular file, or is too large.
        ValueError: as `parse_toml`.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    with path.open("rb") as file:
        content = file.read(_FILE_BYTES_MAX + 1)
    if len(content) > _FILE_BYTES_MAX:
        raise OSError(errno.EFBIG, f"larger than {_FILE_BYTES_MAX} bytes")
    return parse_toml(content)


def check_plain(table: Mapping[str, Any], prefix: str = "") -> None:
    """Check that no value is outside of what settings accept: not finite, beyond 64 bits, over a hundred years, or a
    text with NUL. Raises `SettingError`."""
    for name, value in table.items():
        _check_value(f"{prefix}{name}", value)


def _check_value(name: str, value: object) -> None:
    if isinstance(value, Mapping):
        check_plain(value, f"{name}.")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_value(f"{name}.{index}", item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise SettingError(name, value, "must be a finite number")
    elif isinstance(value, int) and abs(value) > _INTEGER_MAX:
        raise SettingError(name, "(a long number)", f"must be between -{_INTEGER_MAX} and {_INTEGER_MAX}")
    elif isinstance(value, int | float) and _DURATION.search(name) and value > _SECONDS_MAX:
        raise SettingError(name, value, f"must be at most {_SECONDS_MAX}, a hundred years in seconds")
    elif isinstance(value, str) and not is_storable(value):
        raise SettingError(name, value, "must not contain NUL or lone surrogates; remove these characters")


def check_numbers(model: type[BaseModel], table: object, prefix: str) -> None:
    """Check that no number is given as true or false, which pydantic would convert to 1 or 0. Raises `SettingError`."""
    for name, value in table.items() if isinstance(table, Mapping) else ():
        field = model.model_fields.get(name)
        kinds = plain_types(field.annotation) if field else set()
        if kinds & {int, float} and bool not in kinds:
            for item in value if isinstance(value, list) else (value,):
                if isinstance(item, bool):
                    raise SettingError(prefix + name, value, "must be a number, not true or false")
        for section in kinds:
            if isinstance(section, type) and issubclass(section, BaseModel):
                for item in value if isinstance(value, list) else (value,):
                    check_numbers(section, item, f"{prefix}{name}.")


@dataclass(frozen=True, slots=True)
class Fixed:
    """Value that a former setting always has now, and what a user can do who needs another one."""

    value: object
    remedy: str = "remove it"

    def matches(self, value: object) -> bool:
        """Return whether a settings file sets the fixed value."""
        if isinstance(self.value, BaseModel) and isinstance(value, Mapping):
            return all(Fixed(getattr(self.value, name, None)).matches(item) for name, item in value.items())
        fixed = list(self.value) if isinstance(self.value, tuple) else self.value
        return value == fixed or (not isinstance(value, bool | int | float) and str(value) == str(fixed))


def parameters_of(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the fields of a section that are no settings."""
    return getattr(model, "PARAMETERS", ())


def without_fixed(model: type[BaseModel], table: object, prefix: str, notes: list[str]) -> Any:
    """Return a table without the former settings of its sections that have their fixed value.

    Append a sentence about each of them to `notes`.

    Raises:
        SettingError: a former setting has another value.
    """
    if not isinstance(table, Mapping):
        return table
    former: dict[str, Fixed] = {name: Fixed(model.model_fields[name].default) for name in parameters_of(model)}
    former |= getattr(model, "FIXED", {})
    settings: dict[str, Any] = {}
    for name, value in table.items():
        if fixed := former.get(name):
            sentence = f"is no setting any more, its value is fixed ({fixed.value})"
            if not fixed.matches(value):
                raise SettingError(prefix + name, value, f"{sentence}; {fixed.remedy}")
            notes.append(str(SettingError(prefix + name, value, f"{sentence}; remove it")))
            continue
        field = model.model_fields.get(name)
        settings[name] = value
        for section in plain_types(field.annotation) if field else ():
            if isinstance(section, type) and issubclass(section, BaseModel):
                path = f"{prefix}{name}."
                settings[name] = (
                    [without_fixed(section, item, path, notes) for item in value]
                    if isinstance(value, list)
                    else without_fixed(section, value, path, notes)
                )
    return settings


def section_at(model: type[BaseModel], path: list[str]) -> type[BaseModel] | None:
    """Return the section at `path`, or None if there is none."""
    for part in path:
        inner = getattr(model.model_fields.get(part), "annotation", None)
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return None
        model = inner
    return model


def hint(name: str, valid_names: tuple[str, ...] | list[str]) -> str:
    """Return the end of a sentence about an unknown name: the most similar valid name, or all of them."""
    if similar := closest(name, valid_names):
        return f"; did you mean {similar!r}?"
    return f"; known here: {', '.join(sorted(set(valid_names)))}" if valid_names else ""


def plain_types(annotation: object) -> set[Any]:
    """Return the types in an annotation. For `tuple[int, ...] | None` they include `int`."""
    inner = [part for part in get_args(annotation) if part is not Ellipsis]
    if get_origin(annotation) is Literal:
        return {type(value) for value in inner}
    return set().union(*map(plain_types, inner)) if inner else {annotation}


def _file(path: Path) -> dict[str, Any]:
    try:
        return read_toml(path)
    except OSError as error:
        raise SettingError("config", str(path), f"cannot be read: {error.strerror}; name an existing file") from None
    except ValueError as error:
        raise SettingError("config", str(path), str(error)) from None
