"""Line protocols of programs: those that open a model for a command, and the gate's program, which plays held-out
tasks.

`headrace models register`, `import` and `export` start a program that can load weights. `headrace train` starts a
program that applies a model's tokenizer and chat template: the first line is `base`, and the program replies `opened`;
each following line is a `row`, and the program replies `written` or `refused` in the same order.

The program first prints one `Tasks`. Then it reads one `Play` per line and prints one `Played` for each, in any order
and with any number of concurrent plays. It exits at the end of its standard input.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from headrace_schemas.events.chat import Message, Tool
from headrace_schemas.values.arrays import TokenIds
from headrace_schemas.values.base import Finite, Model, ModelName, Text, Version
from headrace_schemas.values.blobs import BlobRef

MANIFEST_FILE = "headrace_manifest.json"
"""Name of the manifest in an exported folder. With it, importing the folder restores the same version."""
Names = Annotated[tuple[Text, ...], Field(min_length=1, max_length=100_000)]


class FolderLine(Model):
    """A line `folder`: the request to store a folder as a version."""

    folder: str
    name: ModelName | None = None
    """The model. Without it the folder must contain an exported version."""
    base: BlobRef | None = None
    """The manifest of the version that an adapter applies to."""


class StoredLine(Model):
    """A line `stored`: the stored version."""

    version: Version
    manifest: BlobRef


class MergeLine(Model):
    """A line `merge`: the request to write adapter and base as one model into a folder."""

    adapter: BlobRef
    base: BlobRef
    folder: str


class MergedLine(Model):
    """A line `merged`: the folder with the merged model."""

    folder: str


class BaseLine(Model):
    """A line `base`: the folder with the tokenizer and the chat template."""

    folder: str
    tokens_max: Annotated[int, Field(ge=2)] | None = None
    """Maximum number of tokens of a row, or None for the model's context length. Longer rows are refused."""


class OpenedLine(Model):
    """The line `opened`: the maximum number of tokens of a row."""

    tokens_max: int


class RowLine(Model):
    """A line `row`: a written conversation. The assistant messages after the prompt are trained."""

    number: Annotated[int, Field(ge=1)]
    prompt: tuple[Message, ...] = Field(default=(), max_length=8192)
    answers: tuple[Annotated[tuple[Message, ...], Field(min_length=1, max_length=8192)], ...] = Field(
        min_length=1, max_length=64
    )
    """Alternative continuations of the prompt, which are compared with each other."""
    tools: tuple[Tool, ...] = Field(default=(), max_length=1024)
    untrained: tuple[int, ...] = ()
    """Indices, counted from the first message of the prompt, of assistant messages that are not trained."""
    shown: bool = False
    """Whether the reply contains the text of each part."""


class WrittenSpan(Model):
    """Tokens of the assistant message with the index `message`."""

    start: Annotated[int, Field(ge=1)]
    length: Annotated[int, Field(ge=1)]
    message: Annotated[int, Field(ge=0)]


class WrittenBranch(Model):
    """One token sequence. If the template renders a message differently later on, another sequence begins there."""

    token_ids: TokenIds
    spans: tuple[WrittenSpan, ...] = Field(min_length=1)
    texts: tuple[str, ...] = ()
    """The texts of context and of trained tokens in turn; empty unless the row has `shown` set."""


class WrittenLine(Model):
    """A line `written`: the branches of each answer."""

    number: int
    answers: tuple[tuple[WrittenBranch, ...], ...]


class RefusedLine(Model):
    """A line `refused`: a row that cannot be trained. `kind` is a stable word, `reason` a sentence."""

    number: int
    kind: str
    reason: str


class Tasks(Model):
    """The first line of the program: the names of all tasks.

    A task that is listed twice counts twice. Other fields are ignored.
    """

    model_config = ConfigDict(extra="ignore")

    gate: Names
    """The tasks that decide whether a version may serve."""
    audit: Names
    """The tasks that take part in no decision. Only their scores are reported."""

    @model_validator(mode="after")
    def _apart(self) -> Self:
        both = set(self.gate) & set(self.audit)
        if both:
            raise ValueError(f"{len(both)} tasks are in both gate and audit, e.g. {min(both)!r}")
        return self


class Play(Model):
    """A line to the program: the request to play a task with a version and the random seed `seed`."""

    version: Version
    task: Text
    seed: Annotated[int, Field(ge=0, lt=2**31)]


class Played(Model):
    """A line from the program: the score of a play. Other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    version: Version
    task: Text
    seed: Annotated[int, Field(ge=0, lt=2**31)]
    score: Annotated[Finite, Field(ge=0, le=1)]
