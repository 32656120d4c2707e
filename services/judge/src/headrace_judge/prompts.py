"""Prompts, rendered from the jinja2 templates in `templates/`. Texts of a run are values, never template code.

Each entry of a run begins with a line that contains a mark: digits of a digest of all entries. A text would have to
    contain its own digest to forge a mark, so a run cannot imitate an end of data or a change of role. Equal runs have
    equal prompts, which the cache requires.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TypedDict

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined, TemplateError

from headrace_judge.rubric import SCALE_MAX, SCALE_MIN, Rubric
from headrace_judge.run_transcript import RunTranscript
from headrace_runtime.errors import SettingError

_NAMES = ("run.jinja", "system.jinja", "single.jinja", "pair.jinja", "again.jinja")
_MARK_LENGTH = 16


class ChatMessage(TypedDict):
    """One message of a request to the endpoint."""

    role: str
    content: str


class Prompts:
    """Renderer of messages for the endpoint. Raises `SettingError` for a template that cannot be loaded.

    Args:
        folder: folder with templates that replace the shipped ones.
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
            _ = self.single(rubric, empty), self.pair(rubric, empty, empty), self.again("")
        except TemplateError as error:
            raise SettingError("judge.templates_dir", rubric.name, str(error)) from None

    def judged_by(self, model: str, rubric: Rubric) -> str:
        """Return the name of the judge: the model, and a digest of the prompt without the run."""
        digest = hashlib.sha256(f"{rubric.digest}{self.digest}".encode()).hexdigest()
        return f"{model}#{digest[:16]}"

    def single(self, rubric: Rubric, run: RunTranscript) -> list[ChatMessage]:
        """Return the messages that request scores of one run."""
        mark = _mark(run)
        return [self._system(rubric, mark), self._message("user", "single.jinja", run=run, mark=mark)]

    def pair(self, rubric: Rubric, first: RunTranscript, second: RunTranscript) -> list[ChatMessage]:
        """Return the messages that request a comparison of two runs. `first` is shown as A."""
        mark = _mark(first, second)
        user = self._message("user", "pair.jinja", first=first, second=second, mark=mark)
        return [self._system(rubric, mark), user]

    def again(self, error: str) -> ChatMessage:
        """Return the message that requests a repaired answer, with the error of the first one."""
        return self._message("user", "again.jinja", error=error)

    def _system(self, rubric: Rubric, mark: str) -> ChatMessage:
        scale = {"scale_min": SCALE_MIN, "scale_max": SCALE_MAX}
        return self._message("system", "system.jinja", rubric=rubric, mark=mark, **scale)

    def _message(self, role: str, template: str, **values: object) -> ChatMessage:
        return {"role": role, "content": self._environment.get_template(template).render(values).strip()}


def _mark(*runs: RunTranscript) -> str:
    return hashlib.sha256("\0".join(run.model_dump_json() for run in runs).encode()).hexdigest()[:_MARK_LENGTH]
