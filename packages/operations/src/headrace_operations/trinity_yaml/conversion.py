"""Conversion of Trinity's explorer and trainer YAML to settings of Headrace, with an explanation for every key.

A key without an equivalent is refused by name if leaving it out would change the behaviour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from headrace.errors import UsageError
from headrace_operations.arguments import model_name
from headrace_operations.toml_text import toml
from headrace_operations.trinity_yaml.keys import KEYS, Unconvertible
from headrace_schemas.values.text import printable, printable_lines, read_user_text


@dataclass
class Conversion:
    """Settings that were converted from Trinity's YAML, with explanations.

    `settings` are by dotted name, `lines` has an explanation for every key, and `refused` has the reasons why the
    conversion fails.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    lines: list[tuple[str, str]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    """Values for the program that plays, such as the location of tasks and the number of steps."""
    keys: dict[str, str] = field(default_factory=dict)
    """Name in `settings` or `data` to the key that it comes from."""
    idle: list[tuple[str, str]] = field(default_factory=list)
    """Keys without an effect in Headrace, with the reason."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys, of which YAML would silently use the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(getattr(key, "value", ""))
            if name in seen and name != "<<":
                line = key.start_mark.line + 1
                raise yaml.YAMLError(
                    f"line {line}: the key {printable(name)} is used twice in a table; remove one of them"
                )
            seen.add(name)
        return super().construct_mapping(node, deep)


def read(path: Path) -> dict[str, Any]:
    """Read a YAML file.

    Raises:
        UsageError: the file is not a YAML table.
    """
    try:
        table = yaml.load(read_user_text(path), Loader=_UniqueKeyLoader)  # noqa: S506 (a SafeLoader)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; name a YAML file of Trinity-RFT") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{path} is not YAML: {printable_lines(str(error), 500)}") from None
    except ValueError as error:
        raise UsageError(f"{path} {error}") from None
    if not isinstance(table, dict):
        raise UsageError(f"{path}: must be a table of keys")
    return table


def convert(*files: Mapping[str, Any]) -> Conversion:
    """Convert the tables of the files, explorer and trainer or one for both, as one.

    A key with different values in two files is refused.
    """
    conversion = Conversion()
    keys: dict[str, Any] = {}
    for file in files:
        for key, value in flat(file).items():
            if key in keys and keys[key] != value and key not in _PER_FILE_KEYS:
                conversion.refused.append(
                    f"{key}: is {keys[key]!r} in one file and {value!r} in the other; must be equal"
                )
            keys[key] = value
    for key in sorted(keys):
        _convert_key(key, keys[key], conversion)
    _combine_keys(keys, conversion)
    return conversion


_PER_FILE_KEYS = frozenset(
    {"mode", "buffer.train_batch_size", "trainer.save_interval", "trainer.ulysses_sequence_parallel_size"}
)
"""Keys that each file has for itself; the value of the last file, the trainer's, is used."""


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested keys as dotted keys; tables that `KEYS` knows stay values."""
    keys: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in KEYS:
            keys |= flat(value, f"{key}.")
        else:
            keys[key] = value
    return keys


def _convert_key(key: str, value: Any, conversion: Conversion) -> None:
    rule = KEYS.get(key) or KEYS.get(f"{key.rpartition('.')[0]}.*")
    if value is None:
        conversion.lines.append((key, "is not set; Headrace uses its default"))
    elif rule is None:
        assignment = f"{printable(key)} = {printable(repr(value))}"
        conversion.refused.append(f"{assignment}: has no equivalent; remove it if nothing depends on it")
    else:
        _apply_rule(key, value, rule, conversion)


def _apply_rule(
    key: str, value: Any, rule: str | Callable[[Any], tuple[dict[str, Any], str]], conversion: Conversion
) -> None:
    if isinstance(rule, str):
        conversion.lines.append((key, rule))
        conversion.idle.append((key, rule))
        return
    try:
        if isinstance(value, list | tuple | dict):
            raise Unconvertible("must be one value")
        settings, explanation = rule(value)
    except Unconvertible as error:
        conversion.refused.append(f"{printable(key)} = {printable(repr(value))}: {error}")
        return
    except (TypeError, ValueError, OverflowError):
        conversion.refused.append(f"{printable(key)} = {printable(repr(value))}: must be a number")
        return
    for name, converted in settings.items():
        (conversion.data if name.startswith("data.") else conversion.settings)[name] = converted
        conversion.keys[name] = key
    conversion.lines.append(
        (key, explanation or ", ".join(f"{name} = {converted!r}" for name, converted in settings.items()))
    )


def _combine_keys(keys: Mapping[str, Any], conversion: Conversion) -> None:
    """Derive the settings that depend on two keys."""
    names = [str(keys[key]) for key in ("project", "group", "name") if keys.get(key)]
    if names:
        conversion.settings["trainer.lineage"] = model_name("-".join(names))
    counts = {"trainer.group_size": 1, "data.tasks_per_step": 0}
    for name in counts:
        value = conversion.settings.get(name, conversion.data.get(name, counts[name]))
        if isinstance(value, bool) or not isinstance(value, int):
            conversion.refused.append(f"{conversion.keys[name]} = {printable(repr(value))}: must be a whole number")
            return
        counts[name] = value
    group, tasks = counts.values()
    if tasks and "trainer.batch_experiences" not in conversion.settings:
        conversion.settings["trainer.batch_experiences"] = tasks * group


def settings_file(conversion: Conversion) -> str:
    """Return the settings as the text of a settings file, with a section for each service."""
    tables: dict[str, list[str]] = {}
    for name, value in sorted(conversion.settings.items()):
        section, _, setting = name.rpartition(".")
        tables.setdefault(section, []).append(f"{setting} = {toml(value)}")
    parts = [("", tables.pop(""))] if "" in tables else []
    sections = [
        (f"[{section}]\n" if section else "") + "\n".join(lines) for section, lines in [*parts, *tables.items()]
    ]
    return "# From Trinity-RFT's files, by `headrace trinity convert`.\n" + "\n\n".join(sections) + "\n"
