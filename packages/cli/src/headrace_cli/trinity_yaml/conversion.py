"""Trinity's explorer and trainer YAML as settings of Headrace: of each key it is said what became of it.

A key that has no meaning here, and could not be left out without a change of what happens, is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from headrace.errors import UsageError
from headrace.stack.connection import model_name
from headrace_cli.trinity_yaml.keys import KEYS, Unconvertible
from headrace_operations.toml_text import toml
from headrace_schemas.text import printable, printable_lines
from headrace_schemas.user_text import read_user_text


@dataclass
class Conversion:
    """`settings` by dotted name; `lines` say of each key of the files what became of it; `refused` stop a
    conversion."""

    settings: dict[str, Any] = field(default_factory=dict)
    lines: list[tuple[str, str]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    """What a program needs besides: where the tasks are, how many steps."""
    keys: dict[str, str] = field(default_factory=dict)
    """The key behind each name of `settings` and `data`."""
    idle: list[tuple[str, str]] = field(default_factory=list)
    """Keys that change nothing here, with the reason."""


class _OnceLoader(yaml.SafeLoader):
    """Refuses a key that stands twice: YAML would take the last and drop the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(getattr(key, "value", ""))
            if name in seen and name != "<<":
                line = key.start_mark.line + 1
                raise yaml.YAMLError(
                    f"line {line}: the key {printable(name)} stands twice in a table; keep one of them"
                )
            seen.add(name)
        return super().construct_mapping(node, deep)


def read(path: Path) -> dict[str, Any]:
    """One of the files. Raises `UsageError`."""
    try:
        found = yaml.load(read_user_text(path), Loader=_OnceLoader)  # noqa: S506 (a SafeLoader)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{path} is no YAML: {printable_lines(str(error), 500)}") from None
    except ValueError as error:
        raise UsageError(f"{path} {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: a table of keys is wanted")
    return found


def convert(*files: Mapping[str, Any]) -> Conversion:
    """The files, explorer and trainer or one for both, as one. What both say has to be the same: `refused`
    otherwise."""
    found = Conversion()
    whole: dict[str, Any] = {}
    for file in files:
        for key, value in flat(file).items():
            if key in whole and whole[key] != value and key not in _OWN:
                found.refused.append(f"{key}: one file says {whole[key]!r}, the other {value!r}; they have to agree")
            whole[key] = value
    for key in sorted(whole):
        _one(key, whole[key], found)
    _together(whole, found)
    return found


_OWN = frozenset({"mode", "buffer.train_batch_size", "trainer.save_interval", "trainer.ulysses_sequence_parallel_size"})
"""Each file has its own; the last one's counts, which is the trainer's."""


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in KEYS:
            found |= flat(value, f"{key}.")
        else:
            found[key] = value
    return found


def _one(key: str, value: Any, found: Conversion) -> None:
    rule = KEYS.get(key) or KEYS.get(f"{key.rpartition('.')[0]}.*")
    if value is None:
        found.lines.append((key, "is not set, and left to the default here"))
    elif rule is None:
        shown = f"{printable(key)} = {printable(repr(value))}"
        found.refused.append(f"{shown}: has no meaning here; take it out, if nothing depends on it")
    else:
        _applied(key, value, rule, found)


def _applied(key: str, value: Any, rule: str | Callable[[Any], tuple[dict[str, Any], str]], found: Conversion) -> None:
    if isinstance(rule, str):
        found.lines.append((key, rule))
        found.idle.append((key, rule))
        return
    try:
        if isinstance(value, list | tuple | dict):
            raise Unconvertible("must be one value")
        settings, said = rule(value)
    except Unconvertible as error:
        found.refused.append(f"{printable(key)} = {printable(repr(value))}: {error}")
        return
    except (TypeError, ValueError, OverflowError):
        found.refused.append(f"{printable(key)} = {printable(repr(value))}: must be a number")
        return
    for name, one in settings.items():
        (found.data if name.startswith("data.") else found.settings)[name] = one
        found.keys[name] = key
    found.lines.append((key, said or ", ".join(f"{name} = {one!r}" for name, one in settings.items())))


def _together(whole: Mapping[str, Any], found: Conversion) -> None:
    """What two keys say between them."""
    names = [str(whole[key]) for key in ("project", "group", "name") if whole.get(key)]
    if names:
        found.settings["trainer.lineage"] = model_name("-".join(names))
    counts = {"trainer.group_size": 1, "data.tasks_per_step": 0}
    for name in counts:
        value = found.settings.get(name, found.data.get(name, counts[name]))
        if isinstance(value, bool) or not isinstance(value, int):
            found.refused.append(f"{found.keys[name]} = {printable(repr(value))}: must be a whole number")
            return
        counts[name] = value
    group, tasks = counts.values()
    if tasks and "trainer.batch_experiences" not in found.settings:
        found.settings["trainer.batch_experiences"] = tasks * group


def settings_file(found: Conversion) -> str:
    """The settings as a file of ours, a section for each service."""
    tables: dict[str, list[str]] = {}
    for name, value in sorted(found.settings.items()):
        section, _, setting = name.rpartition(".")
        tables.setdefault(section, []).append(f"{setting} = {toml(value)}")
    parts = [("", tables.pop(""))] if "" in tables else []
    written = [(f"[{section}]\n" if section else "") + "\n".join(lines) for section, lines in [*parts, *tables.items()]]
    return "# From Trinity-RFT's files, by `headrace trinity convert`.\n" + "\n\n".join(written) + "\n"
