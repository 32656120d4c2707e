"""Whether a change of an event breaks a reader of the released version, in either direction.

Both old events read by new code and new events read by old code must work: replicas are upgraded one by one and topics
are replayed years later. So an existing field never changes, and a new one is optional.
"""

from __future__ import annotations

from typing import Any

_PROSE = {"description", "title", "default", "examples", "$schema"}
Schema = dict[str, Any]


def breaking_changes(released: Schema, current: Schema) -> list[str]:
    """One sentence per change that breaks a reader; empty when `current` is compatible with `released`."""
    problems: list[str] = []
    old_parts = {"": released, **released.get("$defs", {})}
    new_parts = {"": current, **current.get("$defs", {})}
    for name, old in old_parts.items():
        where = name or "the event"
        if name not in new_parts:
            problems.append(f"{where} is gone")
        elif "properties" in old:
            problems += _object_changes(where, old, new_parts[name])
        elif _bare(old) != _bare(new_parts[name]):
            problems.append(f"{where} has changed")
    return problems


def _object_changes(where: str, old: Schema, new: Schema) -> list[str]:
    problems = []
    new_fields = new.get("properties", {})
    for field, schema in old["properties"].items():
        if field not in new_fields:
            problems.append(f"{where}: field {field} is gone")
        elif _bare(schema) != _bare(new_fields[field]):
            problems.append(f"{where}: field {field} has changed")
    was, now = set(old.get("required", ())), set(new.get("required", ()))
    problems += [f"{where}: field {field} became required" for field in sorted(now - was)]
    problems += [f"{where}: field {field} is no longer required" for field in sorted(was - now)]
    return problems


def _bare(schema: Any) -> Any:
    """The schema without its prose, at every depth. A field may itself be called `title`, hence the look at strings."""
    if isinstance(schema, dict):
        return {k: _bare(v) for k, v in schema.items() if k not in _PROSE or isinstance(v, dict)}
    if isinstance(schema, list):
        return [_bare(item) for item in schema]
    return schema
