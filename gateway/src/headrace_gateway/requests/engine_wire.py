"""Models of a replica's response, with the fields of vLLM's chat completions that the gateway reads.

A field that is not declared here is never sent to a client.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Required

from pydantic import BaseModel, ConfigDict, Field, JsonValue, with_config
from typing_extensions import TypedDict  # pydantic needs this one below Python 3.12

from headrace_schemas.values.text import is_storable, storable


class EngineModel(BaseModel):
    """Base of the models. Unknown fields are ignored, because engines add fields with each release."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


@with_config(ConfigDict(extra="ignore"))
class TokenLogprob(TypedDict, total=False):
    """One sampled token with its logprob. It is a plain dictionary, because there is one for each token."""

    token: str
    logprob: Required[float]
    bytes: list[int] | None
    top_logprobs: list[Any]


class ChoiceLogprobs(EngineModel):
    """Object `choices[].logprobs` of a replica's response: logprobs of the sampled tokens."""

    content: list[TokenLogprob] | None = None


class EngineUsage(EngineModel):
    """Object `usage` of a replica's response: numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, JsonValue] | None = None
    completion_tokens_details: dict[str, JsonValue] | None = None


class EngineFunction(EngineModel):
    """Name and arguments of a called function, or a delta of them in a stream."""

    name: str | None = None
    arguments: str | None = None

    def model_post_init(self, _context: Any) -> None:
        self.name = self.name and storable(self.name)
        self.arguments = self.arguments and storable(self.arguments)


class EngineToolCall(EngineModel):
    """Tool call, or in a stream a delta of the call with this `index`."""

    index: int | None = None
    id: str | None = None
    type: str | None = None
    function: EngineFunction = Field(default_factory=EngineFunction)


class EngineMessage(EngineModel):
    """Message, or a delta of one in a stream."""

    role: str | None = None
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(default=None, exclude=True)
    """Name that newer vLLM servers use for `reasoning_content`."""
    tool_calls: list[EngineToolCall] | None = None

    @property
    def indexed_calls(self) -> Iterator[tuple[int, EngineToolCall]]:
        """Yield the tool calls with their indices. A call without an index gets its position."""
        for position, call in enumerate(self.tool_calls or ()):
            yield position if call.index is None else call.index, call

    def model_post_init(self, _context: Any) -> None:
        if self.reasoning is not None and self.reasoning_content is None:
            self.reasoning_content = self.reasoning
        for name in ("content", "reasoning_content"):
            text = getattr(self, name)
            if text is not None and not is_storable(text):  # a model may sample NUL, and its client will send it back
                setattr(self, name, storable(text))


class EngineChoice(EngineModel):
    """One choice of a plain answer (`message`) or of a chunk (`delta`)."""

    index: int
    message: EngineMessage = Field(default_factory=EngineMessage)
    delta: EngineMessage = Field(default_factory=EngineMessage)
    logprobs: ChoiceLogprobs | None = None
    token_ids: list[int] | None = None
    headrace_stored_sets: list[int] | None = Field(default=None, exclude=True)
    """Encoded sets of tokens that `top_p`, `top_k` and `min_p` allowed, an extension of Headrace's engines
    (`Choice.stored_sets`)."""
    finish_reason: str | None = None


class EngineAnswer(EngineModel):
    """Plain answer, or one chunk of a stream. `model` is the version that the engine used."""

    model: str = ""
    choices: list[EngineChoice] = []
    usage: EngineUsage | None = None
    prompt_token_ids: list[int] | None = None
    headrace_grammar: JsonValue = Field(default=None, exclude=True)
    """Grammar with which the answer is sampled, an extension of Headrace's engines (`TokenGrammar`)."""
    headrace_prompt_text: str | None = Field(default=None, exclude=True)
    """Text of a prompt that was sent as token ids, an extension of Headrace's engines."""
    error: JsonValue = None

    def drop_abort(self) -> bool:
        """Remove finish reasons `abort`, with which an engine gives up on a choice. Return whether there was one."""
        aborted = [choice for choice in self.choices if choice.finish_reason == "abort"]
        for choice in aborted:
            choice.finish_reason = None
        return bool(aborted)
