"""The lines between `headrace train` and the program that knows a model's tokenizer and chat template.

See `headrace_schemas.replay` for what a line is. First one line `base`, answered by `opened`; then a line `row` for
each row, each answered by `written` or `refused`, in the same order.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace_schemas.arrays import TokenIds
from headrace_schemas.base import Model
from headrace_schemas.events.chat import Message, Tool


class BaseLine(Model):
    """A line `base`: the folder whose tokenizer and template write what follows."""

    folder: str
    tokens_max: Annotated[int, Field(ge=2)] | None = None
    """Longer rows are refused; None: what the model's context takes."""


class OpenedLine(Model):
    """The line `opened`."""

    tokens_max: int


class RowLine(Model):
    """A line `row`: a conversation that somebody wrote. What the assistant says behind the prompt is trained."""

    number: Annotated[int, Field(ge=1)]
    prompt: tuple[Message, ...] = Field(default=(), max_length=8192)
    answers: tuple[Annotated[tuple[Message, ...], Field(min_length=1, max_length=8192)], ...] = Field(
        min_length=1, max_length=64
    )
    """Each continues the prompt. Several are compared with each other."""
    tools: tuple[Tool, ...] = Field(default=(), max_length=1024)
    untrained: tuple[int, ...] = ()
    """Places, counted from the prompt's first message, of answers that are context only."""
    shown: bool = False
    """With the text of each part, for people."""


class WrittenSpan(Model):
    """Tokens that the assistant says in the message at this place."""

    start: Annotated[int, Field(ge=1)]
    length: Annotated[int, Field(ge=1)]
    message: Annotated[int, Field(ge=0)]


class WrittenBranch(Model):
    """One token sequence. A message that the template shows otherwise later on begins another one."""

    token_ids: TokenIds
    spans: tuple[WrittenSpan, ...] = Field(min_length=1)
    texts: tuple[str, ...] = ()
    """What is context, what is trained, what is context, and so on; empty where nobody asked to see it."""


class WrittenLine(Model):
    """A line `written`: the branches of each answer."""

    number: int
    answers: tuple[tuple[WrittenBranch, ...], ...]


class RefusedLine(Model):
    """A line `refused`. `kind` is a stable word, `reason` a sentence."""

    number: int
    kind: str
    reason: str
