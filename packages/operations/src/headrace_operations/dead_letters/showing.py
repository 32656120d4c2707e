"""Rendering of dead letters as JSON, and as text without control characters."""

from __future__ import annotations

import collections
import contextlib
import json
from collections.abc import Iterable
from typing import Any

from headrace_operations.dead_letters.reading import Letter
from headrace_schemas.values.text import printable_lines

_HEX_BYTES_MAX = 4096


def as_json(letter: Letter, *, with_value: bool = False) -> dict[str, Any]:
    """Return all fields of a letter. `with_value` adds the refused bytes in base64 and, if they are JSON, parsed."""
    fields: dict[str, Any] = {"id": letter.id, "state": letter.state, "retry_of": letter.retry_of}
    fields |= letter.letter.model_dump(mode="json", exclude_none=True, exclude={"value_base64"})
    fields["decisions"] = [decision.model_dump(mode="json", exclude_none=True) for decision in letter.decisions]
    if with_value:
        fields["value_base64"] = letter.letter.value_base64
        with contextlib.suppress(ValueError, RecursionError):
            fields["value"] = json.loads(letter.letter.value)
    return fields


def count_letters(letters: Iterable[Letter]) -> list[dict[str, Any]]:
    """Return the number of letters by service, topic, reason and state, with the first and last time; largest first."""
    groups: dict[tuple[str, str, str], list[Letter]] = collections.defaultdict(list)
    for letter in letters:
        groups[letter.letter.service, letter.letter.source_topic, letter.letter.reason].append(letter)
    rows = []
    for (service, topic, reason), members in groups.items():
        states = collections.Counter(letter.state for letter in members)
        times = sorted(letter.letter.time for letter in members)
        rows.append(
            {
                "service": service, "topic": topic, "reason": reason, "total": len(members),
                "open": states["open"], "retried": states["retried"], "discarded": states["discarded"],
                "first": times[0].isoformat(), "last": times[-1].isoformat(),
            }
        )  # fmt: skip
    return sorted(rows, key=lambda row: (-row["total"], row["service"], row["topic"], row["reason"]))


def decode_value(value: bytes) -> str:
    """Render the refused bytes: JSON indented, other text unchanged, anything else in hexadecimal."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        prefix = value[:_HEX_BYTES_MAX]
        lines = [f"{at:08x}  {prefix[at : at + 16].hex(' ')}" for at in range(0, len(prefix), 16)]
        return "\n".join([*lines, *([f"... {len(value)} bytes in total"] if len(value) > len(prefix) else [])])
    with contextlib.suppress(ValueError, RecursionError):
        text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    return escape_control_characters(text)


def escape_control_characters(text: str) -> str:
    """Return `text` with control characters escaped, because a refused record may contain anything."""
    return printable_lines(text, len(text))
