"""Experiences for control experiments, read from a topic or from the output of `headrace replay events`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from headrace.errors import UsageError
from headrace.topics import Range, connected
from headrace_schemas import Experience
from headrace_schemas.values.errors import InvalidEvent
from headrace_schemas.values.text import decode_text


async def from_bus(bus: str, topic_range: Range) -> list[Experience]:
    """Read the experiences of a range in the order of their times."""
    async with connected(bus) as topics:
        entries = [(entry.time, entry.event) async for entry in topics.read(topic_range)]
    return [event for _, event in sorted(entries, key=lambda entry: entry[0]) if isinstance(event, Experience)]


def from_file(path: Path) -> list[Experience]:
    """Read the JSON lines of `headrace replay events experiences`.

    Raises:
        UsageError: names the first invalid line.
    """
    events = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    events.append(_event(path, number, decode_text(line, number)))
    except ValueError as error:
        raise UsageError(f"{path} {error}") from None
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}; write a file with `headrace replay events experiences -o FILE`"
        ) from None
    return [event for event in events if event is not None]


def _event(path: Path, number: int, line: str) -> Experience | None:
    try:
        read = json.loads(line)
        event = read.get("event", None if "problem" in read else read)
        return None if event is None else Experience.from_json(json.dumps(event).encode())
    except (ValueError, AttributeError, InvalidEvent, RecursionError) as error:  # pydantic's error is a ValueError
        reason = str(error).splitlines()[0]
        raise UsageError(f"{path}, line {number}: is not an experience of `headrace replay events`: {reason}") from None


def select_trainable(experiences: Iterable[Experience], model: str, count: int) -> list[Experience]:
    """Return the newest revision of each branch of `model` that has a reward, in order of the first revisions.

    At most the last `count` are returned.
    """
    latest: dict[str, Experience] = {}
    for experience in experiences:
        earlier = latest.get(experience.experience_id)
        if experience.model == model and (earlier is None or experience.revision >= earlier.revision):
            branch = experience.branch or (earlier.branch if earlier else None)  # a withdrawal may omit the tokens
            latest[experience.experience_id] = (
                experience if branch is experience.branch else experience.model_copy(update={"branch": branch})
            )
    trainable = [
        experience for experience in latest.values() if experience.reward is not None and experience.branch is not None
    ]
    return trainable[-count:]
