"""Detection of changes of an event that break readers, in either direction.

New code must be able to read old events, and old code new events, because replicas are upgraded one by one and topics
are replayed years later. Therefore an existing field must never change, and a new field must be optional.
"""

from __future__ import annotations

from typing import Any

_PROSE = {"description", "title", "default", "examples", "$schema"}
Schema = dict[str, Any]


def breaking_changes(released: Schema, current: Schema) -> list[str]:
    """Return one sentence for each change between the schemas that breaks a reader."""
    problems: list[str] = []
    old_parts = {"": released, **released.get("$defs", {})}
    new_parts = {"": current, **current.get("$defs", {})}
    for name, old in old_parts.items():
        part = name or "the event"
        if name not in new_parts:
            problems.append(f"{part} is gone")
        elif "properties" in old:
            problems += _object_changes(part, old, new_parts[name])
        elif _bare(old) != _bare(new_parts[name]):
            problems.append(f"{part} has changed")
    return problems


def _object_changes(part: str, old: Schema, new: Schema) -> list[str]:
    problems = []
    new_fields = new.get("properties", {})
    for field, schema in old["properties"].items():
        if field not in new_fields:
            problems.append(f"{part}: field {field} is gone")
        elif _bare(schema) != _bare(new_fields[field]):
            problems.append(f"{part}: field {field} has changed")
    old_required, new_required = set(old.get("required", ())), set(new.get("required", ()))
    problems += [f"{part}: field {field} became required" for field in sorted(new_required - old_required)]
    problems += [f"{part}: field {field} is no longer required" for field in sorted(old_required - new_required)]
    return problems


def _bare(schema: Any) -> Any:
    """Return the schema without its prose, at every depth. A dict under a prose key is a field of that name."""
    if isinstance(schema, dict):
        return {k: _bare(v) for k, v in schema.items() if k not in _PROSE or isinstance(v, dict)}
    if isinstance(schema, list):
        return [_bare(item) for item in schema]
    return schema
