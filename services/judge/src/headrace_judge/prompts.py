"""Prompts, made by the jinja2 templates in `templates/`. What a run says reaches them as a value, never as template.

Each entry of a run opens with a line that bears a mark: digits of a digest of everything shown. Text that is shown
would have to contain its own digest to forge one, so neither an end of data nor a change of role can be imitated, and
equal runs still make equal prompts, which the cache needs.
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
    """Messages for the endpoint. `folder` holds templates that replace shipped ones. Raises `SettingError`."""

    def __init__(self, folder: Path | None = None) -> None:
        shipped = PackageLoader("headrace_judge")
        loader = ChoiceLoader([FileSystemLoader(folder), shipped]) if folder else shipped
        # Plain text for a model, not HTML for a browser: nothing is to be escaped.
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
        """Render once with empty runs. Raises `SettingError` when a template uses what there is not."""
        nothing = RunTranscript(entries=())
        try:
            _ = self.single(rubric, nothing), self.pair(rubric, nothing, nothing), self.again("")
        except TemplateError as error:
            raise SettingError("judge.templates_dir", rubric.name, str(error)) from None

    def judged_by(self, model: str, rubric: Rubric) -> str:
        """Names the judge: the model, and a digest of the prompt besides the run."""
        digest = hashlib.sha256(f"{rubric.digest}{self.digest}".encode()).hexdigest()
        return f"{model}#{digest[:16]}"

    def single(self, rubric: Rubric, run: RunTranscript) -> list[ChatMessage]:
        """Asks for scores of one run."""
        mark = _mark(run)
        return [self._system(rubric, mark), self._say("user", "single.jinja", run=run, mark=mark)]

    def pair(self, rubric: Rubric, first: RunTranscript, second: RunTranscript) -> list[ChatMessage]:
        """Asks which of two runs is better; `first` is shown as A."""
        mark = _mark(first, second)
        user = self._say("user", "pair.jinja", first=first, second=second, mark=mark)
        return [self._system(rubric, mark), user]

    def again(self, error: str) -> ChatMessage:
        """Tells the model why its answer could not be read."""
        return self._say("user", "again.jinja", error=error)

    def _system(self, rubric: Rubric, mark: str) -> ChatMessage:
        return self._say("system", "system.jinja", rubric=rubric, mark=mark, scale_min=SCALE_MIN, scale_max=SCALE_MAX)

    def _say(self, role: str, template: str, **values: object) -> ChatMessage:
        return {"role": role, "content": self._environment.get_template(template).render(values).strip()}


def _mark(*runs: RunTranscript) -> str:
    return hashlib.sha256("\0".join(run.model_dump_json() for run in runs).encode()).hexdigest()[:_MARK_LENGTH]
