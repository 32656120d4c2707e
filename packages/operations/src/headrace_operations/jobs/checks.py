"""What can be wrong with a row before it has tokens. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from headrace_operations.jobs.rows import BadRow, DataRow
from headrace_schemas import Message


def check(row: DataRow) -> None:
    """Raises `BadRow`: values that are empty, roles out of order, sides of a preference that do not compare."""
    for answer in row.answers:
        _check_order([*row.prompt, *answer])
        _check_values(row.prompt, answer, row.untrained)
    if len(row.answers) > 1:
        _check_sides(row)


def _check_order(messages: Sequence[Message]) -> None:
    """As a chat goes: the system first, then users, and an assistant who is answered before it speaks again."""
    previous: Message | None = None
    for place, message in enumerate(messages, 1):
        role = "system" if message.role == "developer" else message.role
        if role == "system" and place > 1:
            raise BadRow("order", f"message {place} is the system's; only the first may be")
        if role == "assistant" and (previous is None or previous.role in ("assistant", "system", "developer")):
            before = "the beginning" if previous is None else f"the {previous.role}"
            raise BadRow(
                "order", f"message {place} is the assistant's, right after {before}; somebody has to ask first"
            )
        if role == "tool" and (previous is None or not _called(messages[: place - 1])):
            raise BadRow("order", f"message {place} is a tool's, and the assistant has called none")
        if role == "user" and previous is not None and previous.role == "assistant" and previous.tool_calls:
            raise BadRow("order", f"message {place} is the user's, and the tool that was called has not answered")
        previous = message
    if messages[-1].role != "assistant":
        raise BadRow("order", f"the last message is the {messages[-1].role}'s; an answer of the assistant is wanted")


def _called(before: Sequence[Message]) -> bool:
    """Whether tools may answer now: the assistant called some, and since then only tools have spoken."""
    last = next((message for message in reversed(before) if message.role != "tool"), None)
    return last is not None and last.role == "assistant" and bool(last.tool_calls)


def _check_values(prompt: Sequence[Message], answer: Sequence[Message], untrained: Sequence[int]) -> None:
    for place, message in enumerate([*prompt, *answer], 1):
        if message.text.strip() or message.tool_calls or message.role == "tool":
            continue
        if message.role != "assistant" or message.content is None or not message.reasoning_content:
            raise BadRow("empty", f"message {place}, which the {message.role} says, is empty")
    spoken = [place for place, one in enumerate([*prompt, *answer]) if place >= len(prompt) and one.role == "assistant"]
    if not set(spoken) - set(untrained):
        raise BadRow("empty", "every answer has the weight 0, so nothing would be trained")


def _check_sides(row: DataRow) -> None:
    if len({tuple(answer) for answer in row.answers}) < len(row.answers):
        raise BadRow("equal", "chosen and rejected are equal")
    for answer in row.answers:
        if sum(message.role == "assistant" for message in answer) > 1:
            raise BadRow("order", "a side of a preference has several answers; put what both share into the prompt")


class Repeats:
    """Rows that say what an earlier row says, or the opposite. Remembers a digest of each row."""

    def __init__(self, *, allowed: bool) -> None:
        self._allowed = allowed
        self._places: dict[str, str] = {}
        self._labels: dict[str, tuple[str, bool | None]] = {}

    def check(self, row: DataRow, place: str) -> None:
        """`place` names the row for people. Raises `BadRow`."""
        digest = row.digest
        earlier = self._labels.get(digest)
        if earlier is not None and row.label is not None and earlier[1] is not None and earlier[1] != row.label:
            raise BadRow("contradiction", f"{earlier[0]} says of the same answer that it is {_good(earlier[1])}")
        if len(row.answers) > 1:
            swapped = DataRow(row.prompt, row.answers[::-1], row.tools).digest
            if swapped in self._places:
                raise BadRow("contradiction", f"{self._places[swapped]} prefers the other answer")
        if not self._allowed and digest in self._places:
            raise BadRow("duplicate", f"{self._places[digest]} is the same; --keep-duplicates takes both")
        self._places.setdefault(digest, place)
        self._labels.setdefault(digest, (place, row.label))


def _good(label: bool) -> str:
    return "good" if label else "bad"
