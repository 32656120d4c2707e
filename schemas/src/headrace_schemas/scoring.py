"""Request and response of `POST /v1/logprobs`: logprobs of given answers under one version.

Replicas that set `Replica.scores` serve this route. It is not part of any OpenAI API, and the gateway does not forward
it. The registry uses it to estimate from the answers of one version how another one would perform.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace_schemas.arrays import Logprobs, TokenIds
from headrace_schemas.base import Finite, Model, Version


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
