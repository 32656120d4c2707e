"""Rendering of values as TOML, for settings files, the environment and figures; the standard library only parses it."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from datetime import date, time

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
    """Return a TOML key, quoted where necessary."""
    return name if _BARE.fullmatch(name) else _quote(name)


def _quote(text: str | bytes) -> str:
    """Return a basic TOML string, with the escapes of JSON and one for DEL, which TOML forbids as well."""
    decoded = text if isinstance(text, str) else os.fsdecode(text)
    return json.dumps(decoded, ensure_ascii=False).replace("\x7f", "\\u007f")
