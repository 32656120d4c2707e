"""Row formats by name: plug-ins of the group `headrace.row_formats`.

The built-in formats are announced in this package's `pyproject.toml`. Another package adds a format by announcing a
`RowFormat` with the columns that it needs and a function that reads them. If several formats match the columns of a
row, the one with the most columns is used.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace_operations.jobs.messages import parse_chat, parse_messages, parse_tools, untrained_positions, zero_or_one
from headrace_operations.jobs.sources import BadRow, DataRow
from headrace_runtime.registries import Registry
from headrace_schemas.values.text import plain_number, plain_value

RawRecord = Mapping[str, Any]
_COMMON_COLUMNS = ("system", "tools", "reward")
"""Columns that rows of any format may have."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """A row format. `read` converts a row that has all `columns`, and raises `BadRow` if their values are invalid."""

    columns: tuple[str, ...]
    read: Callable[[RawRecord], DataRow]
    optional: tuple[str, ...] = ()


ROW_FORMATS: Registry[RowFormat] = Registry("row_formats", RowFormat, "row format")


@dataclass(frozen=True)
class RowReader:
    """Parser of data set rows in one of the supported formats, for example chats or preferences.

    Args:
        columns: name of the column in the file, by its name in the format.
        form: name of the format; None selects it for each row by its columns.
        ignored: fields of messages to ignore.
    """

    columns: Mapping[str, str]
    form: str | None = None
    ignored: frozenset[str] = frozenset()

    def read(self, record: RawRecord) -> DataRow:
        """Convert a row of a file to a prompt with answers.

        Raises:
            BadRow: the row is invalid.
            PluginError: the format does not exist.
        """
        renamed = self._rename_columns(record)
        row_format = self._select_format(renamed)
        row = row_format.read(renamed)
        if (text := renamed.get("system")) is not None:
            row = _with_system(row, text)
        if renamed.get("tools") is not None:
            row = replace(row, tools=parse_tools(renamed["tools"]))
        if renamed.get("reward") is not None:
            row = replace(row, reward=_parse_reward(renamed["reward"]))
        return row

    def unread(self, record: RawRecord) -> frozenset[str]:
        """Return the names of the columns of a row that its format ignores."""
        renamed = self._rename_columns(record)
        row_format = self._select_format(renamed)
        return frozenset(renamed) - {*row_format.columns, *row_format.optional, *_COMMON_COLUMNS}

    def _rename_columns(self, record: RawRecord) -> dict[str, Any]:
        missing = [name for name in self.columns.values() if name not in record]
        if missing:
            raise BadRow("format", f"column {missing[0]!r} is missing; the row has {_column_names(record)}")
        source_columns = set(self.columns.values())
        renamed = {name: value for name, value in record.items() if name not in source_columns and value is not None}
        renamed |= {name: record[column] for name, column in self.columns.items()}
        return (
            {name: _drop_ignored(value, self.ignored) for name, value in renamed.items()} if self.ignored else renamed
        )

    def _select_format(self, record: RawRecord) -> RowFormat:
        if self.form is not None:
            row_format = ROW_FORMATS.get(self.form)
            if missing := [name for name in row_format.columns if name not in record]:
                raise BadRow(
                    "format", f"format {self.form} needs column {missing[0]!r}; the row has {_column_names(record)}"
                )
            return row_format
        formats = ROW_FORMATS.all()
        candidates = [entry for entry in formats.values() if all(name in record for name in entry.columns)]
        if not candidates:
            described = "; ".join(f"{name}: {', '.join(entry.columns)}" for name, entry in formats.items())
            raise BadRow(
                "format",
                f"no format has the columns {_column_names(record)}; the formats are {described}; map columns with "
                "--column NAME=COLUMN",
            )
        return max(candidates, key=lambda entry: len(entry.columns))


def _messages(record: RawRecord) -> DataRow:
    return DataRow(
        (),
        (parse_chat(record["messages"], "messages", weighted=True),),
        untrained=untrained_positions(record["messages"]),
    )


def _conversations(record: RawRecord) -> DataRow:
    conversations = record["conversations"]
    return DataRow(
        (), (parse_chat(conversations, "conversations", weighted=True),), untrained=untrained_positions(conversations)
    )


def _completion(record: RawRecord) -> DataRow:
    return DataRow(
        parse_messages(record["prompt"], "user", "prompt"),
        (parse_messages(record["completion"], "assistant", "completion"),),
    )


def _question(record: RawRecord) -> DataRow:
    return DataRow(
        parse_messages(record["question"], "user", "question"),
        (parse_messages(record["answer"], "assistant", "answer"),),
    )


def _instruction(record: RawRecord) -> DataRow:
    parts = [record["instruction"], record.get("input")]
    if not all(part is None or isinstance(part, str) for part in parts):
        raise BadRow("format", "instruction and input must be texts")
    question = "\n\n".join(part for part in parts if part and part.strip())
    return DataRow(
        parse_messages(question, "user", "instruction"), (parse_messages(record["output"], "assistant", "output"),)
    )


def _preference(record: RawRecord) -> DataRow:
    prompt = parse_messages(record["prompt"], "user", "prompt")
    sides = [parse_messages(record[name], "assistant", name) for name in ("chosen", "rejected")]
    sides = [
        side[len(prompt) :] if side[: len(prompt)] == prompt and len(side) > len(prompt) else side for side in sides
    ]
    return DataRow(prompt, (sides[0], sides[1]))


def _preference_of_chats(record: RawRecord) -> DataRow:
    """Read a preference between two conversations; their common beginning is the prompt."""
    chosen, rejected = (parse_chat(record[name], name) for name in ("chosen", "rejected"))
    shared = next((n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    if shared is None:
        raise BadRow("equal", "chosen and rejected are equal, or one continues the other")
    return DataRow(chosen[:shared], (chosen[shared:], rejected[shared:]))


def _labelled_row(record: RawRecord) -> DataRow:
    label = zero_or_one(record["label"])
    if label is None:
        raise BadRow("format", f"label = {reprlib.repr(record['label'])}: must be true or false")
    return replace(_completion(record), label=label)


MESSAGES = RowFormat(("messages",), _messages)
SHARE_GPT = RowFormat(("conversations",), _conversations)
COMPLETION = RowFormat(("prompt", "completion"), _completion)
QUESTION = RowFormat(("question", "answer"), _question)
INSTRUCTION = RowFormat(("instruction", "output"), _instruction, ("input",))
PREFERENCE = RowFormat(("prompt", "chosen", "rejected"), _preference)
PREFERENCE_OF_CHATS = RowFormat(("chosen", "rejected"), _preference_of_chats)
LABELLED = RowFormat(("prompt", "completion", "label"), _labelled_row)


def _with_system(row: DataRow, text: object) -> DataRow:
    if not isinstance(text, str):
        raise BadRow("format", "system must be a text")
    opening = row.prompt or row.answers[0]
    if not text.strip() or opening[0].role in ("system", "developer"):
        return row
    (first,) = parse_messages(text, "system", "system")
    if row.prompt:
        return replace(row, prompt=(first, *row.prompt), untrained=tuple(position + 1 for position in row.untrained))
    answers = tuple((first, *answer) for answer in row.answers)
    return replace(row, answers=answers, untrained=tuple(position + 1 for position in row.untrained))


def _parse_reward(value: object) -> float:
    try:
        if isinstance(plain_value(value), bool):
            raise TypeError("a boolean is a label")
        return plain_number(value)
    except (TypeError, ValueError) as error:
        raise BadRow("format", f"reward = {reprlib.repr(value)}: must be a finite number: {error}") from None


def _drop_ignored(value: Any, ignored: frozenset[str]) -> Any:
    if isinstance(value, list):
        return [_drop_ignored(entry, ignored) for entry in value]
    if isinstance(value, dict):
        return {name: inner for name, inner in value.items() if name not in ignored}
    return value


def _column_names(record: RawRecord) -> str:
    return ", ".join(sorted(map(str, record))) or "none"
