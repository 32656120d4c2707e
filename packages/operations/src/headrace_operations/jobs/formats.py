"""The forms that rows have, by name: whatever an installed package announces under `headrace.row_formats`.

Ours are announced in this package's own `pyproject.toml`. Another package adds one without a change here: a `RowFormat`
with the columns that it needs, and a function that reads them. Of those whose columns a row has, the one that needs the
most is taken.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace_operations.jobs.messages import chat, said, tools, weights, zero_or_one
from headrace_operations.jobs.rows import BadRow, DataRow
from headrace_runtime.registries import Registry
from headrace_schemas.plain_values import plain_number, plain_value

Record = Mapping[str, Any]
_ALWAYS = ("system", "tools", "reward")
"""Columns that any row may have."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """One form. `read` gets a row that has `columns`, and raises `BadRow` for what it cannot mean."""

    columns: tuple[str, ...]
    read: Callable[[Record], DataRow]
    optional: tuple[str, ...] = ()


ROW_FORMATS: Registry[RowFormat] = Registry("row_formats", RowFormat, "row format")


@dataclass(frozen=True)
class RowReader:
    """Reads rows of one source. `columns` maps a column as a format calls it to what it is called there; `form` names
    the format, else each row shows it by its columns; fields of messages in `ignored` are passed over."""

    columns: Mapping[str, str]
    form: str | None = None
    ignored: frozenset[str] = frozenset()

    def read(self, record: Record) -> DataRow:
        """Raises `BadRow`, and `PluginError` for a format that nobody announces."""
        renamed = self._renamed(record)
        found = self._format(renamed)
        row = found.read(renamed)
        if (text := renamed.get("system")) is not None:
            row = _with_system(row, text)
        if renamed.get("tools") is not None:
            row = replace(row, tools=tools(renamed["tools"]))
        if renamed.get("reward") is not None:
            row = replace(row, reward=_number(renamed["reward"]))
        return row

    def unread(self, record: Record) -> frozenset[str]:
        """Columns of a row that nobody looks at."""
        renamed = self._renamed(record)
        found = self._format(renamed)
        return frozenset(renamed) - {*found.columns, *found.optional, *_ALWAYS}

    def _renamed(self, record: Record) -> dict[str, Any]:
        missing = [name for name in self.columns.values() if name not in record]
        if missing:
            raise BadRow("format", f"there is no column {missing[0]!r}; it has {_listed(record)}")
        taken = set(self.columns.values())
        found = {name: value for name, value in record.items() if name not in taken and value is not None}
        found |= {name: record[column] for name, column in self.columns.items()}
        return {name: _passed_over(value, self.ignored) for name, value in found.items()} if self.ignored else found

    def _format(self, record: Record) -> RowFormat:
        if self.form is not None:
            found = ROW_FORMATS.get(self.form)
            if missing := [name for name in found.columns if name not in record]:
                raise BadRow("format", f"{self.form} needs the column {missing[0]!r}; it has {_listed(record)}")
            return found
        fitting = [one for one in ROW_FORMATS.all().values() if all(name in record for name in one.columns)]
        if not fitting:
            forms = "; ".join(f"{name}: {', '.join(one.columns)}" for name, one in ROW_FORMATS.all().items())
            raise BadRow(
                "format",
                f"no format has the columns {_listed(record)}; there are {forms}; see --column NAME=COLUMN",
            )
        return max(fitting, key=lambda one: len(one.columns))


def _messages(record: Record) -> DataRow:
    return DataRow((), (chat(record["messages"], "messages", weighted=True),), untrained=weights(record["messages"]))


def _conversations(record: Record) -> DataRow:
    said_of_all = record["conversations"]
    return DataRow((), (chat(said_of_all, "conversations", weighted=True),), untrained=weights(said_of_all))


def _completion(record: Record) -> DataRow:
    return DataRow(said(record["prompt"], "user", "prompt"), (said(record["completion"], "assistant", "completion"),))


def _question(record: Record) -> DataRow:
    return DataRow(said(record["question"], "user", "question"), (said(record["answer"], "assistant", "answer"),))


def _instruction(record: Record) -> DataRow:
    parts = [record["instruction"], record.get("input")]
    if not all(one is None or isinstance(one, str) for one in parts):
        raise BadRow("format", "instruction and input have to be texts")
    asked = "\n\n".join(one for one in parts if one and one.strip())
    return DataRow(said(asked, "user", "instruction"), (said(record["output"], "assistant", "output"),))


def _preference(record: Record) -> DataRow:
    prompt = said(record["prompt"], "user", "prompt")
    sides = [said(record[name], "assistant", name) for name in ("chosen", "rejected")]
    sides = [
        side[len(prompt) :] if side[: len(prompt)] == prompt and len(side) > len(prompt) else side for side in sides
    ]
    return DataRow(prompt, (sides[0], sides[1]))


def _preference_of_chats(record: Record) -> DataRow:
    """Two whole conversations: what both begin with is the prompt."""
    chosen, rejected = (chat(record[name], name) for name in ("chosen", "rejected"))
    shared = next((n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    if shared is None:
        raise BadRow("equal", "chosen and rejected are equal, or one continues the other")
    return DataRow(chosen[:shared], (chosen[shared:], rejected[shared:]))


def _labelled(record: Record) -> DataRow:
    label = zero_or_one(record["label"])
    if label is None:
        raise BadRow("format", f"label is {reprlib.repr(record['label'])}; true or false is wanted")
    return replace(_completion(record), label=label)


MESSAGES = RowFormat(("messages",), _messages)
SHARE_GPT = RowFormat(("conversations",), _conversations)
COMPLETION = RowFormat(("prompt", "completion"), _completion)
QUESTION = RowFormat(("question", "answer"), _question)
INSTRUCTION = RowFormat(("instruction", "output"), _instruction, ("input",))
PREFERENCE = RowFormat(("prompt", "chosen", "rejected"), _preference)
PREFERENCE_OF_CHATS = RowFormat(("chosen", "rejected"), _preference_of_chats)
LABELLED = RowFormat(("prompt", "completion", "label"), _labelled)


def _with_system(row: DataRow, text: object) -> DataRow:
    if not isinstance(text, str):
        raise BadRow("format", "system has to be a text")
    opening = row.prompt or row.answers[0]
    if not text.strip() or opening[0].role in ("system", "developer"):
        return row
    (first,) = said(text, "system", "system")
    if row.prompt:
        return replace(row, prompt=(first, *row.prompt), untrained=tuple(place + 1 for place in row.untrained))
    answers = tuple((first, *answer) for answer in row.answers)
    return replace(row, answers=answers, untrained=tuple(place + 1 for place in row.untrained))


def _number(value: object) -> float:
    try:
        if isinstance(plain_value(value), bool):
            raise TypeError("a boolean is a label")
        return plain_number(value)
    except (TypeError, ValueError) as error:
        raise BadRow("format", f"reward is {reprlib.repr(value)}; a finite number is wanted: {error}") from None


def _passed_over(value: Any, ignored: frozenset[str]) -> Any:
    if isinstance(value, list):
        return [_passed_over(one, ignored) for one in value]
    if isinstance(value, dict):
        return {name: inner for name, inner in value.items() if name not in ignored}
    return value


def _listed(record: Record) -> str:
    return ", ".join(sorted(map(str, record))) or "none"
