"""`headrace_resume`: how a replica takes over a generation that another one began (P8).

The gateway repeats the original request body, n and sampling included, with this one field added. The engine goes on as
if it had sampled these tokens itself, after exactly this prompt: it streams only what follows them, its penalties, stop
strings and `max_tokens` count them, and its `usage` covers them. A choice with a `finish_reason` is complete and gets
no further chunk.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from headrace_schemas.arrays import SampledLogprobs, TokenIds
from headrace_schemas.base import Model
from headrace_schemas.events.chat import FinishReason

FIELD = "headrace_resume"
"""The name of the field in the request body of `POST /v1/chat/completions`."""


class ResumedChoice(Model):
    """What the client already has of one choice."""

    index: Annotated[int, Field(ge=0)]
    token_ids: TokenIds
    logprobs: SampledLogprobs
    finish_reason: FinishReason | None = None

    @model_validator(mode="after")
    def _one_logprob_per_token(self) -> Self:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"choice {self.index} has {len(self.token_ids)} token ids and {len(self.logprobs)} logprobs"
            )
        return self


class Resume(Model):
    """One entry for each choice that had begun; the others start afresh."""

    prompt_token_ids: TokenIds | None = None
    """The prompt that the tokens were sampled after. Another replica might tokenize the conversation differently."""
    choices: tuple[ResumedChoice, ...] = Field(min_length=1, max_length=128)

    @model_validator(mode="after")
    def _indices_differ(self) -> Self:
        if len({choice.index for choice in self.choices}) != len(self.choices):
            raise ValueError("two entries are about one choice")
        return self
