"""Extensions of the OpenAI API between gateway, registry and replicas, which a stock vLLM server lacks or ignores.

- `POST /v1/logprobs` returns the logprobs of given answers under one version. Replicas that set `Replica.scores` serve
  this route, and the gateway does not forward it. The registry uses it to estimate from the answers of one version how
  another one would perform.
- The request field `headrace_resume` lets a replica continue a generation that another replica began. The gateway
  repeats the original request body, including `n` and the sampling parameters, and adds this field. The engine
  continues as if it had sampled these tokens itself after exactly this prompt: it streams only the tokens that follow,
  and its penalties, stop strings, `max_tokens` and `usage` include the given tokens. A choice with a `finish_reason` is
  complete and gets no further chunk.
- The request field `headrace_history` has the exact tokens of an earlier call of the conversation. The gateway adds it
  where a replica that sets `Replica.histories` did not answer that call itself, or has been restarted since then, so
  that the prompt continues the sampled tokens and not a second tokenization of their text.
- The request field `headrace_prompt` is a prompt that no chat template renders. Replicas that set `Replica.prompts`
  take it.
- HTTP headers describe a call, so that replicas can schedule the calls of all gateways fairly. The request's
  `cache_salt` identifies the tenant of a call.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from headrace_schemas.events.chat import FinishReason
from headrace_schemas.values.base import Finite, Logprobs, Model, SampledLogprobs, TokenIds, Version


class TokensToScore(Model):
    """One answer with the prompt after which it was sampled."""

    prompt_token_ids: TokenIds
    token_ids: TokenIds
    temperature: Annotated[Finite, Field(gt=0.0)] = 1.0


class ScoreRequest(Model):
    """Answers whose logprobs under one exact version are requested."""

    model: Version
    answers: tuple[TokensToScore, ...] = Field(min_length=1, max_length=256)


class ScoredAnswers(Model):
    """One logprob for each token of each answer, in nats, after the temperature was applied."""

    logprobs: tuple[Logprobs, ...]


RESUME_FIELD = "headrace_resume"
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
    """Request field `headrace_resume`: answers that another replica had begun to sample when it failed, to be continued
    from their tokens. Choices without an entry start from the beginning.
    """

    prompt_token_ids: TokenIds | None = None
    """The prompt of the given tokens, because another replica might tokenize the conversation differently."""
    choices: tuple[ResumedChoice, ...] = Field(min_length=1, max_length=128)

    @model_validator(mode="after")
    def _indices_differ(self) -> Self:
        if len({choice.index for choice in self.choices}) != len(self.choices):
            raise ValueError("choices: two entries have the same index")
        return self


HISTORY_FIELD = "headrace_history"
"""The name of the field in the request body of `POST /v1/chat/completions`."""


class History(Model):
    """The field `headrace_history`: the prompt and the answer of an earlier call of the conversation."""

    messages: Annotated[int, Field(ge=1)]
    """Number of the request's messages that were the earlier prompt. The next message is its answer."""
    prompt_token_ids: TokenIds
    token_ids: TokenIds

    @model_validator(mode="after")
    def _has_an_answer(self) -> Self:
        if not self.token_ids:
            raise ValueError("token_ids: is empty; leave out the history of a call without an answer")
        return self


PROMPT_FIELD = "headrace_prompt"
"""The name of the field in the request body of `POST /v1/chat/completions`."""
PROMPT_TEXT_FIELD = "headrace_prompt_text"
"""The name of the field of the answer, or of the first chunk, with the text of a prompt that came as token ids."""


class RawPrompt(Model):
    """The field `headrace_prompt`: the prompt is `token_ids`, or without them the content of the request's only
    message.

    The text may contain control tokens. The answer is returned as plain text: reasoning and tool calls are not parsed.
    """

    token_ids: TokenIds | None = None
    add_special_tokens: bool = True
    """Whether the tokenizer adds the tokens with which its texts begin or end. Without effect on `token_ids`."""

    @model_validator(mode="after")
    def _is_not_empty(self) -> Self:
        if self.token_ids is not None and not self.token_ids:
            raise ValueError("token_ids: is empty; at least one token is needed")
        return self


PURPOSE_HEADER = "x-headrace-purpose"
"""Header with the value `BACKGROUND` for calls that only get the capacity which users leave unused."""
SESSION_HEADER = "x-headrace-session"
"""Header with the session key of a call."""
BACKGROUND = "eval"
