"""Shows dead letters as JSON, and as text without control characters."""

from __future__ import annotations

import collections
import contextlib
import json
from collections.abc import Iterable
from typing import Any

from headrace_operations.dead_letters.reading import Letter
from headrace_schemas.text import printable_lines

_HEX_BYTES_MAX = 4096


def as_json(one: Letter, *, with_value: bool = False) -> dict[str, Any]:
    """Everything about a letter; the refused bytes only when asked, as base64 and, where they are JSON, as that."""
    found: dict[str, Any] = {"id": one.id, "state": one.state, "retry_of": one.retry_of}
    found |= one.letter.model_dump(mode="json", exclude_none=True, exclude={"value_base64"})
    found["decisions"] = [item.model_dump(mode="json", exclude_none=True) for item in one.decisions]
    if with_value:
        found["value_base64"] = one.letter.value_base64
        with contextlib.suppress(ValueError, RecursionError):
            found["value"] = json.loads(one.letter.value)
    return found


def counted(letters: Iterable[Letter]) -> list[dict[str, Any]]:
    """How many there are by service, topic, reason and state, with the first and last time; the most first."""
    groups: dict[tuple[str, str, str], list[Letter]] = collections.defaultdict(list)
    for one in letters:
        groups[one.letter.service, one.letter.source_topic, one.letter.reason].append(one)
    rows = []
    for (service, topic, reason), members in groups.items():
        states = collections.Counter(one.state for one in members)
        times = sorted(one.letter.time for one in members)
        rows.append(
            {
                "service": service, "topic": topic, "reason": reason, "total": len(members),
                "open": states["open"], "retried": states["retried"], "discarded": states["discarded"],
                "first": times[0].isoformat(), "last": times[-1].isoformat(),
            }
        )  # fmt: skip
    return sorted(rows, key=lambda row: (-row["total"], row["service"], row["topic"], row["reason"]))


def decoded(value: bytes) -> str:
    """The refused bytes for people: JSON laid out, other text as it is, anything else in hexadecimal."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        shown = value[:_HEX_BYTES_MAX]
        lines = [f"{at:08x}  {shown[at : at + 16].hex(' ')}" for at in range(0, len(shown), 16)]
        return "\n".join([*lines, *([f"... {len(value)} bytes in all"] if len(value) > len(shown) else [])])
    with contextlib.suppress(ValueError, RecursionError):
        text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    return harmless(text)


def harmless(text: str) -> str:
    """Return `text` with control characters written out: what was refused may hold anything."""
    return printable_lines(text, len(text))
