"""A topic is a file here: producer, consumers, key, partitions, retention, and what it promises.

This module only finds the files, so that the schemas depend on pydantic alone; `headrace_runtime.topics` reads them.
"""

from __future__ import annotations

from importlib.resources import files


def sources() -> dict[str, str]:
    """The YAML text of each topic file, by topic name."""
    found = sorted((entry for entry in files(__package__).iterdir()), key=lambda entry: entry.name)
    return {
        entry.name.removesuffix(".yaml"): entry.read_text(encoding="utf-8")
        for entry in found
        if entry.name.endswith(".yaml")
    }
