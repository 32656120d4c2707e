"""Generator of the JSON Schema of each event and of the AsyncAPI 3 document, for `make schemas`.

Usage: `python -m headrace_schemas.generate [--check | --release]`. It needs PyYAML, which only developers install.
`--release` also stores the present schemas as the released ones, with which later changes must be compatible: new code
must be able to read old events, and old code new events, because replicas are upgraded one by one and topics are
replayed years later. Therefore an existing field must never change, and a new field must be optional.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from headrace_schemas import EVENTS
from headrace_schemas.values.base import Event

JSON_FOLDER = Path(__file__).parent / "json"
RELEASED_FILE = JSON_FOLDER / "released.json"
TOPICS_FILE = Path(__file__).parent / "topics.yaml"
_HEADERS = {
    "type": "object",
    "description": "CloudEvents 1.0, binary mode. A producer may leave out all of them.",
    "properties": {
        "ce_specversion": {"const": "1.0"},
        "ce_id": {"type": "string", "description": "equal for equal facts; consumers dedupe by it"},
        "ce_type": {"type": "string"},
        "ce_source": {"type": "string"},
        "ce_time": {"type": "string", "format": "date-time"},
        "ce_subject": {"type": "string"},
        "ce_dataref": {"type": "string", "description": "set when the value is a blob reference"},
        "traceparent": {"type": "string", "description": "W3C Trace Context"},
    },
}


def json_schema(event: type[Event]) -> dict[str, Any]:
    """Return the JSON Schema of an event.

    Its definitions are named by their titles, because a title stays when its class is renamed.
    """
    schema = event.model_json_schema(mode="validation")
    titles = {name: part.get("title", name) for name, part in schema.get("$defs", {}).items()}
    text = json.dumps(schema)
    for name, title in titles.items():
        text = text.replace(f'"#/$defs/{name}"', f'"#/$defs/{title}"')
    schema = json.loads(text)
    if titles:
        schema["$defs"] = dict(sorted((titles[name], part) for name, part in schema["$defs"].items()))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": event.type, **_without(schema, "title")}


def asyncapi() -> dict[str, Any]:
    """Return the AsyncAPI document: one channel and one message per topic, one operation per producer and consumer."""
    specs = yaml.safe_load(TOPICS_FILE.read_text(encoding="utf-8"))
    channels, messages, operations = {}, {}, {}
    for name, spec in specs.items():
        event = EVENTS[name]
        messages[name] = {
            "name": event.type,
            "contentType": "application/json",
            "headers": {"$ref": "#/components/schemas/headers"},
            "payload": {"$ref": f"./{name}.json"},
            "bindings": {"kafka": {"key": {"type": "string", "description": spec["key"]}}},
        }
        channels[name] = {
            "address": name,
            "description": " ".join([spec["description"], *(f"{promise}." for promise in spec["promises"])]),
            "messages": {name: {"$ref": f"#/components/messages/{name}"}},
            "bindings": {"kafka": _kafka_binding(spec)},
        }
        for action, services in (("send", [spec["producer"]]), ("receive", spec["consumers"])):
            for service in services:
                operations[f"{service.replace(' ', '-')}-{action}s-{name}"] = {
                    "action": action,
                    "channel": {"$ref": f"#/channels/{name}"},
                }
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Headrace events", "version": "1", "description": "Generated from the models; do not edit."},
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": operations,
        "components": {"messages": messages, "schemas": {"headers": _HEADERS}},
    }


def _kafka_binding(spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "partitions": spec["partitions"],
        "topicConfiguration": {
            "cleanup.policy": [spec["cleanup"]],
            "retention.ms": spec["retention_ms"],
            "max.message.bytes": spec["max_message_bytes"],
        },
    }


def _without(schema: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name != key}


def documents() -> dict[str, str]:
    """Return the content of each generated file by file name."""
    contents = {f"{name}.json": json_schema(event) for name, event in EVENTS.items()}
    contents["asyncapi.json"] = asyncapi()
    return {name: _dump(content) for name, content in contents.items()}


def released_document() -> str:
    """Return the present schemas of all events by topic, as `--release` stores them."""
    return _dump({name: json_schema(event) for name, event in EVENTS.items()})


def _dump(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="compare the files without writing them; exit with 1 if a file differs"
    )
    parser.add_argument("--release", action="store_true", help="also replace the released schemas")
    options = parser.parse_args()
    texts = {JSON_FOLDER / name: text for name, text in documents().items()}
    if options.release:
        texts[RELEASED_FILE] = released_document()
    stale = [path for path, text in texts.items() if _read(path) != text]
    for path in stale if not options.check else ():
        path.write_text(texts[path], encoding="utf-8")
    print(f"{'differs' if options.check else 'written'}: {', '.join(path.name for path in stale) or 'nothing'}")
    return 1 if options.check and stale else 0


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


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
        elif _without_prose(old) != _without_prose(new_parts[name]):
            problems.append(f"{part} has changed")
    return problems


def _object_changes(part: str, old: Schema, new: Schema) -> list[str]:
    problems = []
    new_fields = new.get("properties", {})
    for field, schema in old["properties"].items():
        if field not in new_fields:
            problems.append(f"{part}: field {field} is gone")
        elif _without_prose(schema) != _without_prose(new_fields[field]):
            problems.append(f"{part}: field {field} has changed")
    old_required, new_required = set(old.get("required", ())), set(new.get("required", ()))
    problems += [f"{part}: field {field} became required" for field in sorted(new_required - old_required)]
    problems += [f"{part}: field {field} is no longer required" for field in sorted(old_required - new_required)]
    return problems


def _without_prose(schema: Any) -> Any:
    """Return the schema without descriptions, titles, defaults and examples (`_PROSE`), at every depth.

    A dict under such a key defines a field of that name and stays.
    """
    if isinstance(schema, dict):
        return {k: _without_prose(v) for k, v in schema.items() if k not in _PROSE or isinstance(v, dict)}
    if isinstance(schema, list):
        return [_without_prose(item) for item in schema]
    return schema


if __name__ == "__main__":
    sys.exit(main())
