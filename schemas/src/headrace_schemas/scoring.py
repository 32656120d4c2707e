"""`POST /v1/logprobs` of a replica that says so (`Replica.scores`): how probable a version finds answers that others
gave.

Not part of any OpenAI API, and not served by the gateway: the registry asks a replica, to see whether users' answers
may speak for another version.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace_schemas.arrays import Logprobs, TokenIds
from headrace_schemas.base import Finite, Model, Version


class TokensToScore(Model):
    """One answer, and what it was sampled after."""

    prompt_token_ids: TokenIds
    token_ids: TokenIds
    temperature: Annotated[Finite, Field(gt=0.0)] = 1.0


class ScoreRequest(Model):
    """Answers, which are read with one exact version."""

    model: Version
    answers: tuple[TokensToScore, ...] = Field(min_length=1, max_length=256)


class ScoredAnswers(Model):
    """One logprob for each token of each answer, in nats, after the temperature."""

    logprobs: tuple[Logprobs, ...]
