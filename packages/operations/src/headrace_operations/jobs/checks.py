"""Checks of a row before it is tokenized. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from headrace_operations.jobs.rows import BadRow, DataRow
from headrace_schemas import Message


def check(row: DataRow) -> None:
    """Check one row.

    Raises:
        BadRow: a message is empty, the roles are out of order, or the answers of a preference cannot be compared.
    """
    for answer in row.answers:
        _check_order([*row.prompt, *answer])
        _check_values(row.prompt, answer, row.untrained)
    if len(row.answers) > 1:
        _check_sides(row)


def _check_order(messages: Sequence[Message]) -> None:
    """Check the order of roles: system first, then user messages, each answered before the assistant answers again."""
    previous: Message | None = None
    for number, message in enumerate(messages, 1):
        role = "system" if message.role == "developer" else message.role
        if role == "system" and number > 1:
            raise BadRow("order", f"message {number}: a system message must be the first message")
        if role == "assistant" and (previous is None or previous.role in ("assistant", "system", "developer")):
            predecessor = "the start" if previous is None else f"a message with role {previous.role}"
            raise BadRow(
                "order", f"message {number}: an assistant message follows {predecessor}; a user message must precede it"
            )
        if role == "tool" and (previous is None or not _expects_tool_result(messages[: number - 1])):
            raise BadRow("order", f"message {number}: a tool result without a tool call of the assistant before it")
        if role == "user" and previous is not None and previous.role == "assistant" and previous.tool_calls:
            raise BadRow("order", f"message {number}: a user message before the result of the tool call")
        previous = message
    if messages[-1].role != "assistant":
        raise BadRow("order", f"the last message has role {messages[-1].role}; it must be an assistant message")


def _expects_tool_result(messages: Sequence[Message]) -> bool:
    """Return whether a tool result may follow: the assistant called tools, and only tool results came since then."""
    last = next((message for message in reversed(messages) if message.role != "tool"), None)
    return last is not None and last.role == "assistant" and bool(last.tool_calls)


def _check_values(prompt: Sequence[Message], answer: Sequence[Message], untrained: Sequence[int]) -> None:
    for number, message in enumerate([*prompt, *answer], 1):
        if message.text.strip() or message.tool_calls or message.role == "tool":
            continue
        if message.role != "assistant" or message.content is None or not message.reasoning_content:
            raise BadRow("empty", f"message {number} with role {message.role} is empty")
    answer_positions = {
        position
        for position, message in enumerate([*prompt, *answer])
        if position >= len(prompt) and message.role == "assistant"
    }
    if not answer_positions - set(untrained):
        raise BadRow("empty", "every answer has weight 0, so nothing would be trained")


def _check_sides(row: DataRow) -> None:
    if len({tuple(answer) for answer in row.answers}) < len(row.answers):
        raise BadRow("equal", "chosen and rejected are equal")
    for answer in row.answers:
        if sum(message.role == "assistant" for message in answer) > 1:
            raise BadRow(
                "order", "chosen or rejected has several assistant messages; move the common part into the prompt"
            )


class DuplicateDetector:
    """Detector of rows that repeat or contradict an earlier row. It stores a digest of each row."""

    def __init__(self, *, allowed: bool) -> None:
        self._allowed = allowed
        self._locations: dict[str, str] = {}
        self._labels: dict[str, tuple[str, bool | None]] = {}

    def check(self, row: DataRow, location: str) -> None:
        """Check a row against all rows before it.

        Args:
            row: the row.
            location: file and row number for messages.

        Raises:
            BadRow: the row is a duplicate or contradicts an earlier row.
        """
        digest = row.digest
        earlier = self._labels.get(digest)
        if earlier is not None and row.label is not None and earlier[1] is not None and earlier[1] != row.label:
            raise BadRow("contradiction", f"{earlier[0]} labels the same answer as {_label_name(earlier[1])}")
        if len(row.answers) > 1:
            swapped = DataRow(row.prompt, row.answers[::-1], row.tools).digest
            if swapped in self._locations:
                raise BadRow("contradiction", f"{self._locations[swapped]} prefers the other answer")
        if not self._allowed and digest in self._locations:
            raise BadRow("duplicate", f"{self._locations[digest]} is identical; --keep-duplicates trains both")
        self._locations.setdefault(digest, location)
        self._labels.setdefault(digest, (location, row.label))


def _label_name(label: bool) -> str:
    return "good" if label else "bad"
