"""Adds the lines of `headrace connect` to the configuration files of agents, which may have other settings."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace_schemas.values.text import read_user_text

_TABLE = re.compile(r"^\s*\[")
_KEY = re.compile(r"^\s*(?:export\s+)?([\w.-]+)\s*[:=]")


def merge_json(text: str, lines: str) -> str:
    """Return a JSON file with the values of `lines`; other values stay. Raises `ValueError` for another form."""
    current = json.loads(text or "{}")
    if not isinstance(current, dict):
        raise ValueError("it holds no JSON object")
    return json.dumps(_merged(current, json.loads(lines)), indent=2, ensure_ascii=False) + "\n"


def merge_toml(text: str, lines: str) -> str:
    """Return a TOML file with the top-level keys and the tables of `lines`. Raises `ValueError` for another form."""
    expected = _merged(tomllib.loads(text), tomllib.loads(lines))
    top, tables = _split_toml(lines)
    current_top, current_tables = _split_toml(text)
    headers = {block.partition("\n")[0].strip() for block in tables}
    other_tables = [block for block in current_tables if block.partition("\n")[0].strip() not in headers]
    first = merge_lines("\n".join(current_top), "\n".join(top)).strip()
    merged = "\n\n".join(block.strip() for block in [first, *other_tables, *tables]) + "\n"
    if tomllib.loads(merged) != expected:
        raise ValueError("its values are in a form that cannot be edited line by line")
    return merged


def merge_lines(text: str, lines: str) -> str:
    """Return a file of `NAME=VALUE` or `name: value` lines in which those of `lines` replace lines of equal names."""
    replacements = {name: line for line in lines.splitlines() if (name := _name_of(line))}
    other_lines = [line for line in text.splitlines() if _name_of(line) not in replacements]
    return "\n".join([*other_lines, *replacements.values()]) + "\n"


def write(file: Path, content: str) -> Path | None:
    """Write `content` in one step, readable by its owner alone. Return the copy of the first earlier file, if any.

    Raises:
        UsageError: The file cannot be written.
    """
    from headrace_runtime.storage.files import owner_alone, replace_file

    backup = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            backup = file.with_name(f"{file.name}.before-headrace")
            if not backup.exists():
                replace_file(backup, file.read_bytes(), opener=owner_alone)
        replace_file(file, content.encode(), opener=owner_alone)
    except OSError as error:
        raise UsageError(f"{file}: cannot be written: {error.strerror}; check the folder and its permissions") from None
    return backup


def read(file: Path) -> str:
    """Return the text of a file, empty where there is none. Raises `UsageError`."""
    try:
        return read_user_text(file)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: cannot be read: {error}; print the lines without --write, and add them") from None


def _merged(current: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(current)
    for name, value in added.items():
        inner = merged.get(name)
        merged[name] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def _split_toml(text: str) -> tuple[list[str], list[str]]:
    """Return the lines before the first table, and each table from its header on."""
    top: list[str] = []
    tables: list[str] = []
    for line in text.splitlines():
        if _TABLE.match(line):
            tables.append(line)
        elif tables:
            tables[-1] += f"\n{line}"
        else:
            top.append(line)
    return top, tables


def _name_of(line: str) -> str | None:
    match = _KEY.match(line)
    return match.group(1) if match else None
