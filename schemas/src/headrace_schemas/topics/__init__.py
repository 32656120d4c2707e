"""Topic files, one per topic: producer, consumers, key, partitions, retention and guarantees.

This module only locates the files, so that the schemas depend on pydantic alone. `headrace_runtime.kafka.topics` parses
them.
"""

from __future__ import annotations

from importlib.resources import files


def sources() -> dict[str, str]:
    """Return the YAML text of each topic file by topic name."""
    entries = sorted((entry for entry in files(__package__).iterdir()), key=lambda entry: entry.name)
    return {
        entry.name.removesuffix(".yaml"): entry.read_text(encoding="utf-8")
        for entry in entries
        if entry.name.endswith(".yaml")
    }
