"""Values as TOML, for a settings file, the environment and figures; the standard library only reads it."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from datetime import date, time

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def toml(value: object) -> str:
    """A value as TOML on one line. TOML has no null: a table leaves out what is None. Raises `TypeError` for what TOML
    cannot say."""
    if isinstance(value, Mapping):
        given = {str(name): item for name, item in value.items() if item is not None}
        items = (f"{key(name)} = {toml(item)}" for name, item in given.items())
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
        return _quoted(os.fspath(value))
    raise TypeError(f"{value!r}: TOML has no {type(value).__name__}")


def key(name: str) -> str:
    """A name in front of `=`, in quotes where it has to be."""
    return name if _BARE.fullmatch(name) else _quoted(name)


def _quoted(text: str | bytes) -> str:
    """A basic string: what JSON escapes, and DEL, which TOML allows no more than the other control characters."""
    decoded = text if isinstance(text, str) else os.fsdecode(text)
    return json.dumps(decoded, ensure_ascii=False).replace("\x7f", "\\u007f")
