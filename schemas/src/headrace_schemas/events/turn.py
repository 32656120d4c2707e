"""Events of `turns`: single model calls with the exact tokens that were sampled, and the tokens that were allowed.

An answer is sampled from softmax(logits / T) restricted to a set of allowed tokens. A grammar determines the sets:
they are computed again from the grammar and the sampled tokens. `top_p`, `top_k` and `min_p` determine them by the
model's logits: they are stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headrace_schemas.events.chat import FinishReason, Message, Sampling, Tool
from headrace_schemas.values.base import (
    Event,
    LongText,
    Model,
    ModelName,
    SampledLogprobs,
    SessionKey,
    Sha256,
    Share,
    Text,
    Timestamp,
    TokenIds,
    Version,
)
from headrace_schemas.values.bounds import INT32

STORED_SETS_MAX = 32_768
"""Largest number of integers in the stored sets of one turn. A turn with more is served, and left out of training."""

STOP_IDS_MAX = 1024
"""Largest number of tokens that end an answer. Models with more are not loaded."""

TokenId = Annotated[int, Field(ge=0), INT32]

StoredSets = Annotated[TokenIds, Field(max_length=STORED_SETS_MAX)]
"""The allowed tokens at each position of an answer: for each sampled token the size of its set, then the set's ids."""


class TokenGrammar(Model):
    """The grammar that restricted an answer, with all other inputs from which its allowed tokens are computed again."""

    text: LongText
    """The grammar in the language of `library`."""
    library: Text
    library_version: Text
    tokenizer_sha256: Sha256
    """Digest of the version's tokenizer file."""
    vocabulary: Annotated[int, Field(ge=1), INT32]
    """Number of token ids of the model."""
    end_id: TokenId
    """Token that ends an answer for the library."""
    stop_ids: Annotated[tuple[TokenId, ...], Field(max_length=STOP_IDS_MAX)]
    """Tokens that end an answer. All of them are allowed where `end_id` is."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all fields."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


def iterate_sets(stored: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield the token ids that could be sampled at each position. Raises `ValueError` if a size exceeds the array.

    Args:
        stored: for each position the number of ids, then the ids.
    """
    position = 0
    while position < len(stored):
        end = position + 1 + stored[position]
        if end > len(stored):
            raise ValueError(f"stored sets: the set at {position} has {stored[position]} ids and the array ends before")
        yield stored[position + 1 : end]
        position = end


def check_sets(stored: Sequence[int], token_ids: Sequence[int]) -> None:
    """Raise `ValueError` unless `stored` (see `iterate_sets`) has a set for each token, which contains the token."""
    sets = list(iterate_sets(stored))
    if len(sets) != len(token_ids):
        raise ValueError(f"stored sets: {len(sets)} sets for {len(token_ids)} tokens; the numbers must be equal")
    for index, (ids, token) in enumerate(zip(sets, token_ids, strict=True)):
        if token not in ids:
            raise ValueError(f"stored sets: the set of token {index} does not contain it")


SessionSource = Literal["header", "metadata", "path", "key", "implicit"]
Purpose = Literal["train", "eval"]
MESSAGES_MAX = 8192
"""Maximum number of messages of one turn."""


class Choice(Model):
    """One sampled completion of a turn."""

    index: Annotated[int, Field(ge=0), INT32]
    token_ids: TokenIds
    logprobs: SampledLogprobs
    finish_reason: FinishReason
    message: Message
    stored_sets: StoredSets | None = None
    """The sets of tokens that `top_p`, `top_k` and `min_p` left, or None if the engine did not report them."""

    @model_validator(mode="after")
    def _stored_sets_agree(self) -> Self:
        if self.stored_sets is not None:
            check_sets(self.stored_sets, self.token_ids)
        return self

    @model_validator(mode="after")
    def _one_logprob_per_token(self) -> Self:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"choice {self.index} has {len(self.token_ids)} token ids and {len(self.logprobs)} logprobs; "
                "the numbers must be equal"
            )
        return self


class Usage(Model):
    """Token counts as the engine reported them."""

    prompt_tokens: Annotated[int, Field(ge=0), INT32]
    completion_tokens: Annotated[int, Field(ge=0), INT32]


class UnitAssignment(Model):
    """The role of a turn's unit (session or user) in the rollouts in progress."""

    rollouts: tuple[Text, ...] = Field(min_length=1, max_length=8)
    """Ids of rollouts. With arm `candidate`: the rollout of that candidate. With `control`: the rollouts for which the
    unit is a control. With `rest`: all rollouts in progress."""
    arm: Literal["candidate", "control", "rest"]
    unit: Text
    propensity: Share
    """The probability with which the unit was assigned its version at its first turn. If no replica had that version
    ready, another version answered (`Turn.version`). Rollouts compare units by arm, whichever version answered."""


class SubAgent(Model):
    """A sub-agent of a session, which works on a part of the session's task in a conversation of its own."""

    agent: Text
    parent: Text | None = None
    """The agent that called it: another sub-agent, or None for the session's own agent."""


class ResponseRecord(Model):
    """How later requests of OpenAI's Responses API can refer to this turn, and the response that it continues."""

    stored: bool = True
    """Whether the client may refer to the response by its id (`store`)."""
    instructions: bool = False
    """Whether the first message is the request's `instructions`, which later requests do not repeat."""
    previous_response_id: Text | None = None
    added_messages: Annotated[int, Field(ge=0), INT32] = 0
    """The number of last messages that the request added to those of the previous response; 0 if a message has parts
    of both."""
    conversation: Text | None = None
    """The conversation that the request and its answer were added to."""


class TurnReference(Model):
    """Reference to an earlier turn of the session whose prompt and answer begin this prompt, so they are not repeated.

    The shared token ids are the first `tokens` of the earlier prompt followed by the sampled ids of `choice`, and the
    shared messages are the first `messages` of the earlier messages followed by the message of `choice`.
    """

    turn_id: Text
    choice: Annotated[int, Field(ge=0), INT32] = 0
    """The position of the choice in the earlier turn's choices."""
    tokens: Annotated[int, Field(ge=1), INT32]
    messages: Annotated[int, Field(ge=0), INT32] = 0
    tools: bool = False
    """Whether the turn was offered exactly the tools of the earlier one."""
    digest: Sha256
    """SHA-256 of the shared token ids as little-endian int32."""


class Turn(Event):
    """One model call as the engine executed it. Produced by the gateway once the response is complete.

    A turn that `extends` an earlier one contains only the messages, prompt ids and tools that it adds.
    `headrace_schemas.rules.turn_history` restores its whole prompt.

    The event is invalid unless the numbers of prompt ids, token ids and logprobs agree with each other and with
    `usage`. `version` is the version that the engine reported, never the requested one.
    """

    topic: ClassVar[str] = "turns"
    type: ClassVar[str] = "headrace.turn.v1"
    sampled_text: ClassVar[bool] = True

    turn_id: Text
    """The response id, `chatcmpl-<session key>-<uuid7>`."""
    session_key: SessionKey
    session_id: Text
    session_source: SessionSource
    tenant: Text = "default"
    purpose: Purpose = "train"
    task_id: Text | None = None
    run_id: Text | None = None

    model: ModelName
    version: Version
    replica_id: Text
    request_digest: Sha256
    """Digest of the request. With `retry` it distinguishes the retry of an SDK from a parallel sample."""
    retry: Annotated[int, Field(ge=0), INT32] = 0
    """Number of the retry of the client's SDK, 0 for the first attempt."""
    delivered: bool = True
    """False if the client disconnected before the response ended. Such turns are captured but never trained."""
    untrained: Text | None = None
    """The reason why turns of this version are never trained, such as `registered`, or None if they may be."""

    extends: TurnReference | None = None
    """The earlier turn whose prompt this one continues, or None if this turn contains its whole prompt."""
    messages: tuple[Message, ...] = Field(min_length=1, max_length=MESSAGES_MAX)
    tools: tuple[Tool, ...] = Field(default=(), max_length=1024)
    sampling: Sampling
    token_grammar: TokenGrammar | None = None
    """The grammar that the engine sampled with, or None without one and if the engine did not report it."""
    prompt_token_ids: TokenIds
    choices: tuple[Choice, ...] = Field(min_length=1, max_length=128)
    usage: Usage
    started_at: Timestamp
    """The time at which the gateway accepted the request. `time` is that of the complete response."""
    assignment: UnitAssignment | None = None
    """None without a rollout in progress, for a call that named a version, and for sessions that had begun before."""
    shadow_of: SessionKey | None = None
    """The user's session whose prompt this turn answers again, invisible to the user. Its purpose is `eval`, so that no
    reader of any release trains it or counts it as a user's turn."""
    side_call: Text | None = None
    """The kind of a call that the client made for a purpose other than its task, such as a title for its conversation.
    With `no_tools` the gateway only supposes it, and the collector decides by the other turns of the session."""
    repeats: Text | None = None
    """The earlier turn of the session with the same request, if its client may not have got the answer: the connection
    closed before its end, or the request came again within seconds."""
    sub_agent: SubAgent | None = None
    """The sub-agent that made the call. None for the session's own agent."""
    response: ResponseRecord | None = None
    """None for calls of other APIs, and for responses that no later request may refer to."""
    rendered: bool = True
    """Whether the chat template rendered the messages. False for a text completion: its prompt is the content of the
    only message, and no other call can be made from its messages."""

    @model_validator(mode="after")
    def _usage_agrees(self) -> Self:
        sampled = sum(len(choice.token_ids) for choice in self.choices)
        shared = self.extends.tokens if self.extends else 0
        if shared + len(self.prompt_token_ids) != self.usage.prompt_tokens:
            counted = f"{shared} shared and {len(self.prompt_token_ids)}" if shared else f"{len(self.prompt_token_ids)}"
            raise ValueError(f"usage.prompt_tokens = {self.usage.prompt_tokens}: must equal the {counted} prompt ids")
        if sampled != self.usage.completion_tokens:
            raise ValueError(
                f"usage.completion_tokens = {self.usage.completion_tokens}: must equal the {sampled} sampled ids"
            )
        return self

    @model_validator(mode="after")
    def _extends_an_earlier_turn(self) -> Self:
        if self.extends is None:
            return self
        if self.extends.turn_id == self.turn_id:
            raise ValueError(f"extends.turn_id = {self.turn_id!r}: is the turn itself; name an earlier turn")
        if self.extends.tools and self.tools:
            raise ValueError("tools: must be empty, because extends.tools refers to the tools of the earlier turn")
        if self.message_count > MESSAGES_MAX:
            raise ValueError(
                f"messages: {self.message_count} with the shared ones; a turn has at most {MESSAGES_MAX} messages"
            )
        return self

    @property
    def message_count(self) -> int:
        """The number of messages of the whole prompt."""
        return len(self.messages) + (self.extends.messages if self.extends else 0)

    @property
    def recomputable(self) -> bool:
        """Whether the sampling distribution of each token can be computed from the model's logits and this event.

        Algorithms that need the logprobs of the sampling policy train only such turns.
        """
        sampling = self.sampling
        if not sampling.drawn:
            return False
        if sampling.truncated:
            stored = [choice.stored_sets for choice in self.choices]
            return None not in stored and sum(len(sets or ()) for sets in stored) <= STORED_SETS_MAX
        return sampling.grammar is None or self.token_grammar is not None

    @property
    def event_id(self) -> str:
        return self.turn_id

    @property
    def key(self) -> str:
        return self.session_key

    @property
    def subject(self) -> str:
        return self.turn_id
