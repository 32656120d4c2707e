"""The transcript of a run that the judge reads: entries in order, with separate roles and bounded length.

The kind of an entry says who wrote it, so an answer that imitates a tool result is still shown as an answer. Where text
is left out for length, the transcript says how much.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict

from headrace_judge.rubric import Part, Rubric
from headrace_schemas import Message, Trajectory

Kind = Literal[
    "context", "tool", "instructions", "question", "reasoning", "step", "tool_call", "tool_result", "answer", "note"
]
_BY_THE_MODEL = frozenset({"reasoning", "step", "tool_call", "answer"})
_PART: dict[Kind, Part] = {
    "tool": "tools",
    "instructions": "instructions",
    "question": "question",
    "reasoning": "reasoning",
    "step": "steps",
    "tool_call": "tool_calls",
    "tool_result": "tool_results",
    "answer": "answer",
}


class TranscriptEntry(BaseModel):
    """One message, call, result or fact. `name` is the name of the tool, or the key of the fact."""

    model_config = ConfigDict(frozen=True)

    kind: Kind
    text: str
    name: str = ""


class RunTranscript(BaseModel):
    """The entries of one run. It holds no ids, because verdicts are cached by its JSON: equal runs are asked once."""

    model_config = ConfigDict(frozen=True)

    entries: tuple[TranscriptEntry, ...]
    shortened: bool = False


def transcript_of(trajectory: Trajectory, rubric: Rubric) -> RunTranscript | None:
    """The parts of the run that `rubric` shows. None: nothing that the model did is among them."""
    whole = [entry for entry in _entries(trajectory, rubric) if entry.text or entry.kind == "tool_call"]
    if not any(entry.kind in _BY_THE_MODEL for entry in whole):
        return None
    entries = _fit([_shorten(entry, rubric.part_chars_max) for entry in whole], rubric.run_chars_max)
    shortened = entries != whole
    if len(trajectory.dialogues) > 1:
        text = f"The run has {len(trajectory.dialogues)} lines of conversation; the longest one is shown."
        entries = [TranscriptEntry(kind="note", text=text), *entries]
    return RunTranscript(entries=tuple(entries), shortened=shortened)


def _entries(trajectory: Trajectory, rubric: Rubric) -> Iterator[TranscriptEntry]:
    for key in rubric.context:
        if key in trajectory.context:
            yield TranscriptEntry(kind="context", name=key, text=_plain(trajectory.context[key]))
    if "tools" in rubric.show:
        for tool in trajectory.tools:
            yield TranscriptEntry(
                kind="tool", name=tool.function.name, text=tool.function.description or "(no description)"
            )
    last = len(trajectory.messages) - 1
    called: dict[str, str] = {}
    for index, message in enumerate(trajectory.messages):
        called.update({call.id: call.function.name for call in message.tool_calls or ()})
        for entry in _said(message, called, last=index == last):
            if _PART[entry.kind] in rubric.show:
                yield entry


def _said(message: Message, called: dict[str, str], *, last: bool) -> Iterator[TranscriptEntry]:
    """`called` maps the id of each call to its tool; a result only names the call."""
    if message.role == "user":
        yield TranscriptEntry(kind="question", text=message.text)
    elif message.role == "tool":
        name = called.get(message.tool_call_id or "", message.name or "")
        yield TranscriptEntry(kind="tool_result", name=name, text=message.text or "(empty)")
    elif message.role == "assistant":
        yield TranscriptEntry(kind="reasoning", text=message.reasoning_content or "")
        yield TranscriptEntry(kind="answer" if last else "step", text=message.text)
        for call in message.tool_calls or ():
            yield TranscriptEntry(kind="tool_call", name=call.function.name, text=call.function.arguments)
    else:
        yield TranscriptEntry(kind="instructions", text=message.text)


def _shorten(entry: TranscriptEntry, chars_max: int) -> TranscriptEntry:
    """The entry with its middle replaced by the number of missing characters."""
    if len(entry.text) <= chars_max:
        return entry
    half = chars_max // 2
    text = f"{entry.text[:half]}\n[... {len(entry.text) - 2 * half} characters left out ...]\n{entry.text[-half:]}"
    return entry.model_copy(update={"text": text})


def _fit(entries: list[TranscriptEntry], chars_max: int) -> list[TranscriptEntry]:
    """The first and the last entries that fit (half of the bound each), and a note that counts those between."""
    if sum(map(_size, entries)) <= chars_max:
        return entries
    head = _fitting(entries, chars_max // 2)
    tail = _fitting(entries[::-1], chars_max // 2)
    missing = entries[head : len(entries) - tail]
    characters = sum(map(_size, missing))
    note = TranscriptEntry(kind="note", text=f"{len(missing)} entries with {characters} characters were left out here.")
    return [*entries[:head], note, *entries[len(entries) - tail :]]


def _fitting(entries: list[TranscriptEntry], chars_max: int) -> int:
    size = 0
    for count, entry in enumerate(entries):
        size += _size(entry)
        if size > chars_max:
            return count
    return len(entries)


def _size(entry: TranscriptEntry) -> int:
    return len(entry.text) + len(entry.name)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
