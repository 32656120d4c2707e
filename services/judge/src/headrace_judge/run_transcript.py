"""Transcripts of runs for the judge, and prompts rendered from templates.

A transcript has entries in the order of the run, with their authors and a bounded length. The kind of an entry
determines its author, so an answer that imitates a tool result is still shown as an answer. If text is removed because
of its length, the transcript contains the number of removed characters.

Each entry of a run begins with a line that contains a mark: digits of a digest of all entries. A text would have to
contain its own digest to forge a mark, so a run cannot imitate an end of data or a change of role. Equal runs have
equal prompts, which the cache requires.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypedDict

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined, TemplateError
from pydantic import BaseModel, ConfigDict

from headrace_judge.rubric import SCALE_MAX, SCALE_MIN, Part, Rubric
from headrace_runtime.errors import SettingError
from headrace_schemas import Message, Trajectory

Kind = Literal[
    "context", "tool", "instructions", "question", "reasoning", "step", "tool_call", "tool_result", "answer", "note"
]
_MODEL_OUTPUT = frozenset({"reasoning", "step", "tool_call", "answer"})
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
_NAMES = ("run.jinja", "system.jinja", "single.jinja", "pair.jinja", "again.jinja")
_MARK_LENGTH = 16


class TranscriptEntry(BaseModel):
    """Part of the run's text that the judge reads: a message, a tool call, its result, or a fact about the run."""

    model_config = ConfigDict(frozen=True)

    kind: Kind
    text: str
    name: str = ""


class RunTranscript(BaseModel):
    """Entries of one run, without ids. Verdicts are cached by its JSON, so runs with equal entries are judged once."""

    model_config = ConfigDict(frozen=True)

    entries: tuple[TranscriptEntry, ...]
    shortened: bool = False


def transcript_of(trajectory: Trajectory, rubric: Rubric) -> RunTranscript | None:
    """Return the transcript of the parts that `rubric` shows, or None if they contain no output of the model."""
    all_entries = [entry for entry in _entries(trajectory, rubric) if entry.text or entry.kind == "tool_call"]
    if not any(entry.kind in _MODEL_OUTPUT for entry in all_entries):
        return None
    entries = _fit([_shorten(entry, rubric.part_chars_max) for entry in all_entries], rubric.run_chars_max)
    shortened = entries != all_entries
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
    tool_names: dict[str, str] = {}
    for index, message in enumerate(trajectory.messages):
        tool_names.update({call.id: call.function.name for call in message.tool_calls or ()})
        for entry in _message_entries(message, tool_names, last=index == last):
            if _PART[entry.kind] in rubric.show:
                yield entry


def _message_entries(message: Message, tool_names: dict[str, str], *, last: bool) -> Iterator[TranscriptEntry]:
    """Yield the entries of one message.

    Args:
        tool_names: name of the called tool by the call's id; results contain only the id. Calls of this message are
            added.
        last: whether it is the last message of the run.
    """
    if message.role == "user":
        yield TranscriptEntry(kind="question", text=message.text)
    elif message.role == "tool":
        name = tool_names.get(message.tool_call_id or "", message.name or "")
        yield TranscriptEntry(kind="tool_result", name=name, text=message.text or "(empty)")
    elif message.role == "assistant":
        yield TranscriptEntry(kind="reasoning", text=message.reasoning_content or "")
        yield TranscriptEntry(kind="answer" if last else "step", text=message.text)
        for call in message.tool_calls or ():
            yield TranscriptEntry(kind="tool_call", name=call.function.name, text=call.function.arguments)
    else:
        yield TranscriptEntry(kind="instructions", text=message.text)


def _shorten(entry: TranscriptEntry, chars_max: int) -> TranscriptEntry:
    """Return a long entry with its middle replaced by a note with the number of removed characters."""
    if len(entry.text) <= chars_max:
        return entry
    half = chars_max // 2
    text = f"{entry.text[:half]}\n[... {len(entry.text) - 2 * half} characters left out ...]\n{entry.text[-half:]}"
    return entry.model_copy(update={"text": text})


def _fit(entries: list[TranscriptEntry], chars_max: int) -> list[TranscriptEntry]:
    """Shorten a transcript: return its first and last entries, each in half of the bound, with a note in place of
    the others."""
    if sum(map(_size, entries)) <= chars_max:
        return entries
    head = _count_fitting(entries, chars_max // 2)
    tail = _count_fitting(entries[::-1], chars_max // 2)
    missing = entries[head : len(entries) - tail]
    characters = sum(map(_size, missing))
    note = TranscriptEntry(kind="note", text=f"{len(missing)} entries with {characters} characters were left out here.")
    return [*entries[:head], note, *entries[len(entries) - tail :]]


def _count_fitting(entries: list[TranscriptEntry], chars_max: int) -> int:
    """Return how many entries, from the first one on, fit into `chars_max` characters together."""
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


class ChatMessage(TypedDict):
    """One message of a request to the endpoint."""

    role: str
    content: str


class Prompts:
    """Renderer of the judge's prompts. Raises `SettingError` for a template that cannot be loaded.

    Args:
        folder: folder with templates that replace the shipped ones; None for the shipped ones alone.
    """

    def __init__(self, folder: Path | None = None) -> None:
        shipped = PackageLoader("headrace_judge")
        loader = ChoiceLoader([FileSystemLoader(folder), shipped]) if folder else shipped
        # The output is plain text for a model and not HTML, so it must not be escaped.
        self._environment = Environment(
            loader=loader,
            autoescape=False,  # noqa: S701
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=StrictUndefined,
        )
        sources = []
        try:
            for name in _NAMES:
                sources.append(loader.get_source(self._environment, name)[0])
                self._environment.get_template(name)
        except (TemplateError, OSError, UnicodeDecodeError) as error:
            raise SettingError("judge.templates_dir", str(folder), f"{name}: {error}") from None
        self.digest = hashlib.sha256("\0".join(sources).encode()).hexdigest()

    def check(self, rubric: Rubric) -> None:
        """Render all templates with empty runs. Raises `SettingError` if a template uses an undefined variable."""
        empty = RunTranscript(entries=())
        try:
            _ = self.run_messages(rubric, empty), self.pair_messages(rubric, empty, empty), self.repair_request("")
        except TemplateError as error:
            raise SettingError("judge.templates_dir", rubric.name, str(error)) from None

    def judged_by(self, model: str, rubric: Rubric) -> str:
        """Return the name of the judge for its rewards: the model, and a digest of rubric and templates."""
        digest = hashlib.sha256(f"{rubric.digest}{self.digest}".encode()).hexdigest()
        return f"{model}#{digest[:16]}"

    def run_messages(self, rubric: Rubric, run: RunTranscript) -> list[ChatMessage]:
        """Return the messages that request the scores of one run."""
        mark = _mark(run)
        return [self._system(rubric, mark), self._message("user", "single.jinja", run=run, mark=mark)]

    def pair_messages(self, rubric: Rubric, first: RunTranscript, second: RunTranscript) -> list[ChatMessage]:
        """Return the messages that request a comparison of two runs. `first` is shown as A."""
        mark = _mark(first, second)
        user = self._message("user", "pair.jinja", first=first, second=second, mark=mark)
        return [self._system(rubric, mark), user]

    def repair_request(self, error: str) -> ChatMessage:
        """Return the message that requests a valid answer from the judge's model.

        Args:
            error: the problem of the invalid answer.
        """
        return self._message("user", "again.jinja", error=error)

    def _system(self, rubric: Rubric, mark: str) -> ChatMessage:
        scale = {"scale_min": SCALE_MIN, "scale_max": SCALE_MAX}
        return self._message("system", "system.jinja", rubric=rubric, mark=mark, **scale)

    def _message(self, role: str, template: str, **values: object) -> ChatMessage:
        return {"role": role, "content": self._environment.get_template(template).render(values).strip()}


def _mark(*runs: RunTranscript) -> str:
    return hashlib.sha256("\0".join(run.model_dump_json() for run in runs).encode()).hexdigest()[:_MARK_LENGTH]
