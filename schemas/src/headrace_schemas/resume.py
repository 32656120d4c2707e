"""Request field `headrace_resume`, with which a replica continues a generation that another replica began (P8).

The gateway repeats the original request body, including `n` and the sampling parameters, and adds this field. The
engine continues as if it had sampled these tokens itself after exactly this prompt: it streams only the tokens that
follow, and its penalties, stop strings, `max_tokens` and `usage` include the given tokens. A choice with a
`finish_reason` is complete and gets no further chunk.
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
    """The part of one choice that the client has already received."""

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
    """The field `headrace_resume`, with one entry for each choice that had begun. All other choices start anew."""

    prompt_token_ids: TokenIds | None = None
    """The prompt of the given tokens, because another replica might tokenize the conversation differently."""
    choices: tuple[ResumedChoice, ...] = Field(min_length=1, max_length=128)

    @model_validator(mode="after")
    def _indices_differ(self) -> Self:
        if len({choice.index for choice in self.choices}) != len(self.choices):
            raise ValueError("choices: two entries have the same index")
        return self
