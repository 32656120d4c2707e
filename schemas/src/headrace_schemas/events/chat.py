"""The parts of an OpenAI chat that events carry: messages, tool calls, tools, sampling."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headrace_schemas.base import Finite, LongText, Model, Text
from headrace_schemas.bounds import INT32, SAMPLING, Int64, JsonObject

Role = Literal["system", "developer", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class FunctionCall(Model):
    """The function that a tool call names."""

    name: Text
    arguments: LongText
    """JSON as the model wrote it; it may be malformed, that is the model's doing and the reward's business."""


class ToolCall(Model):
    """A call that the model asked for."""

    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall


class TextPart(Model):
    """One part of a content that came as a list."""

    type: Literal["text"] = "text"
    text: LongText


class Message(Model):
    """One chat message. Only `role="assistant"` was written by the model; rewards rely on it."""

    role: Role
    content: LongText | tuple[TextPart, ...] | None = None
    name: Text | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    tool_call_id: Text | None = None
    reasoning_content: LongText | None = None

    @property
    def text(self) -> str:
        """The content as one string, whichever form it came in."""
        if isinstance(self.content, tuple):
            return "".join(part.text for part in self.content)
        return self.content or ""


class FunctionDefinition(Model):
    """What a tool is called and takes."""

    name: Text
    description: LongText | None = None
    parameters: JsonObject | None = None
    """A JSON Schema, passed through untouched."""
    strict: bool | None = None


class Tool(Model):
    """A tool that the model was offered."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class Grammar(Model):
    """What an answer was held to: tokens that leave it could not be sampled."""

    response_format: JsonObject | None = None
    """As the client sent it: `json_object`, or `json_schema` with the schema."""
    tool_choice: Text | None = None
    """`required`: some call; `function`: a call of `function`."""
    function: Text | None = None


SAMPLED_TEMPERATURE_MIN = 0.01
"""A lower temperature is greedy decoding, in every engine and in what is trained: logits divided by less leave float32,
and vLLM samples at no lower one."""


class Sampling(Model):
    """How the tokens were sampled: the client's own choice, recorded and never overwritten."""

    temperature: Annotated[Finite, Field(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[Finite, Field(gt=0.0, le=1.0), SAMPLING] = 1.0
    top_k: Annotated[int, Field(ge=-1), INT32] = -1
    max_tokens: Annotated[int, Field(ge=1), INT32] | None = None
    seed: Int64 | None = None
    stop: tuple[Text, ...] = ()
    presence_penalty: Annotated[Finite, Field(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[Finite, Field(ge=-2.0, le=2.0)] = 0.0
    grammar: Grammar | None = None
    """None: the model could say anything."""

    @property
    def untruncated(self) -> bool:
        """True when the sampled distribution is the model's own softmax at this temperature.

        Only such tokens can be trained: a distribution that was truncated, penalised or held by a grammar has other
        probabilities than the trainer recomputes.
        """
        full = self.top_p == 1.0 and self.top_k in (-1, 0) and self.grammar is None
        sampled = self.temperature >= SAMPLED_TEMPERATURE_MIN
        return full and sampled and self.presence_penalty == 0 and self.frequency_penalty == 0
