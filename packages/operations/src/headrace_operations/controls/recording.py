"""The experiences that controls train on: from a topic, or from the JSON lines of `headrace replay events`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from headrace.errors import UsageError
from headrace.topics import Range, connected
from headrace_schemas import Experience
from headrace_schemas.errors import InvalidEvent
from headrace_schemas.user_text import decode_text


async def from_bus(bus: str, wanted: Range) -> list[Experience]:
    """Whatever the range holds, in the order of the records' times."""
    async with connected(bus) as topics:
        read = [(entry.time, entry.event) async for entry in topics.read(wanted)]
    return [event for _, event in sorted(read, key=lambda one: one[0]) if isinstance(event, Experience)]


def from_file(path: Path) -> list[Experience]:
    """Raises `UsageError` with the line that is none."""
    found = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    found.append(_event(path, number, decode_text(line, number)))
    except ValueError as error:
        raise UsageError(f"{path} {error}") from None
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}; write one with `headrace replay events experiences -o FILE`"
        ) from None
    return [event for event in found if event is not None]


def _event(path: Path, number: int, line: str) -> Experience | None:
    try:
        read = json.loads(line)
        event = read.get("event", None if "problem" in read else read)
        return None if event is None else Experience.from_json(json.dumps(event).encode())
    except (ValueError, AttributeError, InvalidEvent, RecursionError) as error:  # pydantic's too
        reason = str(error).splitlines()[0]
        raise UsageError(f"{path}, line {number}: no line of `headrace replay events experiences`: {reason}") from None


def usable(experiences: Iterable[Experience], model: str, most: int) -> list[Experience]:
    """The last word on each branch of `model` that has a reward, at its first place; of these the latest `most`."""
    latest: dict[str, Experience] = {}
    for one in experiences:
        known = latest.get(one.experience_id)
        if one.model == model and (known is None or one.revision >= known.revision):
            branch = one.branch or (known.branch if known else None)  # a withdrawal need not repeat the tokens
            latest[one.experience_id] = one if branch is one.branch else one.model_copy(update={"branch": branch})
    return [one for one in latest.values() if one.reward is not None and one.branch is not None][-most:]
