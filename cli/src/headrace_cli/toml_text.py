"""Values as TOML, for a settings file and for the environment; the standard library only reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping


def toml(value: object) -> str:
    """A value as TOML on one line: JSON is the same for what settings are made of, tables apart. TOML has no null, so
    what has none in a table is left out."""
    if isinstance(value, Mapping):
        given = {name: item for name, item in value.items() if item is not None}
        items = (f"{json.dumps(str(name), ensure_ascii=False)} = {toml(item)}" for name, item in given.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(str(value) if isinstance(value, os.PathLike) else value, ensure_ascii=False)
