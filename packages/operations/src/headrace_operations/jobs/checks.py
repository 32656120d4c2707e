"""Checks of rows before a job begins, and their report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import quantiles

from headrace.errors import UsageError
from headrace_operations.jobs.sources import BadRow, DataRow
from headrace_schemas import Message
from headrace_schemas.programs import WrittenBranch

REFUSALS_LISTED_MAX = 1000
_PRINTED_MAX = 10


def check(row: DataRow) -> None:
    """Check that one row can be trained.

    Raises:
        BadRow: a message is empty, the roles are out of order, or the answers of a preference cannot be compared.
    """
    for answer in row.answers:
        _check_order([*row.prompt, *answer])
        _check_values(row.prompt, answer, row.untrained)
    if len(row.answers) > 1:
        _check_sides(row)


def _check_order(messages: Sequence[Message]) -> None:
    """Raise `BadRow` unless the roles alternate as in a conversation.

    A system message may only be the first. A message of the assistant follows one of the user or the result of a tool,
    and the results of its tool calls come before the next message of the user. The last message is the assistant's.
    """
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
        """Check that a row neither repeats nor contradicts an earlier one, and remember it.

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


@dataclass(frozen=True, slots=True)
class Refusal:
    """A row that cannot be trained, with the reason."""

    file: str
    row: int
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}: {self.reason}"


@dataclass(frozen=True, slots=True)
class PreviewRow:
    """A row with the texts of its tokens, for printing how it would be trained."""

    file: str
    row: int
    answers: tuple[tuple[WrittenBranch, ...], ...]


@dataclass(slots=True)
class CheckReport:
    """Counts of the checked rows, which grow while the rows are read."""

    rows: int = 0
    kept: int = 0
    experiences: int = 0
    """Number of branches of one epoch."""
    forks: int = 0
    """Branches beyond the first of an answer; the template renders earlier messages differently in later turns."""
    trained_tokens: int = 0
    lengths: list[int] = field(default_factory=list)
    """Number of tokens of each branch."""
    tokens_max: int = 0
    held_out: int = 0
    """Number of held-out tasks that the rows were compared with."""
    unread: Counter[str] = field(default_factory=Counter)
    """Number of rows by column that no format reads."""
    refused: Counter[str] = field(default_factory=Counter)
    """Number of refused rows by kind."""
    refusals: list[Refusal] = field(default_factory=list)
    """The first refusals, at most `REFUSALS_LISTED_MAX`."""
    shown: list[PreviewRow] = field(default_factory=list)

    def refuse(self, refusal: Refusal) -> None:
        """Count an invalid row by the reason for which it cannot be trained."""
        self.refused[refusal.kind] += 1
        if len(self.refusals) < REFUSALS_LISTED_MAX:
            self.refusals.append(refusal)

    def accept(self, answers: tuple[tuple[WrittenBranch, ...], ...]) -> None:
        """Count a valid row of the data set: add its experiences, sequence lengths and trained tokens to the totals.

        Args:
            answers: for each answer of the row, the token sequences (branches) that are trained for it.
        """
        self.kept += 1
        for branches in answers:
            self.experiences += len(branches)
            self.forks += len(branches) - 1
            for branch in branches:
                self.lengths.append(len(branch.token_ids))
                self.trained_tokens += sum(span.length for span in branch.spans)

    @property
    def bad(self) -> int:
        return self.refused.total()

    def spread(self) -> dict[str, int]:
        """Return minimum, median, 95th percentile and maximum of the branch lengths in tokens, or nothing without
        branches.
        """
        if not self.lengths:
            return {}
        lengths = sorted(self.lengths)
        cuts = quantiles(lengths, n=20, method="inclusive") if len(lengths) > 1 else lengths * 19
        return {"least": lengths[0], "median": round(cuts[9]), "95 of 100": round(cuts[18]), "most": lengths[-1]}

    def check(self, skip_bad: int) -> None:
        """Check that at most `skip_bad` rows were refused and at least one row can be trained.

        Raises:
            UsageError: the check fails; the message names the first refused rows.
        """
        if self.bad > skip_bad:
            listed = "\n  ".join(map(str, self.refusals[:_PRINTED_MAX]))
            remaining = f"\n  and {self.bad - _PRINTED_MAX} more" if self.bad > _PRINTED_MAX else ""
            allowed = f", but --skip-bad allows {skip_bad}" if skip_bad else ""
            raise UsageError(
                f"{self.bad} of {self.rows} rows cannot be trained{allowed}:\n  {listed}{remaining}\n"
                f"fix the rows, or skip them with --skip-bad {self.bad}"
            )
        if not self.kept:
            raise UsageError(f"none of {self.rows} rows can be trained")
