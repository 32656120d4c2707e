"""Parts of an OpenAI chat in events: messages, tool calls, tools and sampling parameters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headrace_schemas.values.base import Finite, LongText, Model, SampledText, Text
from headrace_schemas.values.bounds import INT32, SAMPLING, Int64, JsonObject

Role = Literal["system", "developer", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class FunctionCall(Model):
    """The function of a tool call with its arguments."""

    name: Text
    arguments: SampledText
    """JSON as the model wrote it. It may be malformed; a reward function may penalise that."""


class ToolCall(Model):
    """A tool call that the model requested."""

    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall


class TextPart(Model):
    """One text part of a message whose content is a list."""

    type: Literal["text"] = "text"
    text: SampledText


class Message(Model):
    """One chat message. Rewards rely on it that the model wrote exactly the messages with `role="assistant"`."""

    role: Role
    content: SampledText | tuple[TextPart, ...] | None = None
    name: Text | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    tool_call_id: Text | None = None
    reasoning_content: SampledText | None = None

    @property
    def text(self) -> str:
        """The content as one string, also if it is a list of parts."""
        if isinstance(self.content, tuple):
            return "".join(part.text for part in self.content)
        return self.content or ""


class FunctionDefinition(Model):
    """Name, description and parameters of a tool."""

    name: Text
    description: LongText | None = None
    parameters: JsonObject | None = None
    """The parameters as a JSON Schema, which is passed on unchanged."""
    strict: bool | None = None


class Tool(Model):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class Grammar(Model):
    """Constraints on the form of an answer. Tokens that would violate them cannot be sampled."""

    response_format: JsonObject | None = None
    """The request field as the client sent it: `json_object`, or `json_schema` with the schema."""
    tool_choice: Text | None = None
    """`required` for a call of any tool, `function` for a call of `function`."""
    function: Text | None = None


LOGIT_BIAS_MAX = 1024
"""Largest number of tokens in `logit_bias`."""
Penalty = Annotated[Finite, Field(ge=-2.0, le=2.0)]
LogitBias = Annotated[
    dict[Annotated[int, Field(ge=0), INT32], Annotated[Finite, Field(ge=-100.0, le=100.0)]],
    Field(max_length=LOGIT_BIAS_MAX),
]
"""Additions to the logits of tokens, by token id."""


class LogitShift(Model):
    """Additions to the logits, before temperature and truncation, as OpenAI defines them."""

    presence_penalty: Penalty = 0.0
    """Subtracted from the logit of each token that the choice has sampled before."""
    frequency_penalty: Penalty = 0.0
    """Subtracted once for each time that the choice has sampled the token before."""
    logit_bias: LogitBias = Field(default_factory=dict)


SAMPLED_TEMPERATURE_MIN = 0.01
"""Below this temperature engines and trainer decode greedily: logits divided by a smaller number do not fit float32,
and vLLM has the same minimum."""


class Sampling(Model):
    """Sampling parameters of a call as the client chose them. Headrace never overwrites them."""

    temperature: Annotated[Finite, Field(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[Finite, Field(gt=0.0, le=1.0), SAMPLING] = 1.0
    top_k: Annotated[int, Field(ge=-1), INT32] = -1
    min_p: Annotated[Finite, Field(ge=0.0, le=1.0)] = 0.0
    """Smallest probability of a token, as a share of that of the most likely one. 0 keeps all tokens."""
    max_tokens: Annotated[int, Field(ge=1), INT32] | None = None
    seed: Int64 | None = None
    stop: tuple[Text, ...] = ()
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: LogitBias = Field(default_factory=dict)
    grammar: Grammar | None = None
    """The constraints on the answer; None without any."""

    @property
    def truncated(self) -> bool:
        """Whether `top_p`, `top_k` or `min_p` removed unlikely tokens."""
        return self.top_p < 1.0 or self.top_k not in (-1, 0) or self.min_p > 0.0

    @property
    def drawn(self) -> bool:
        """Whether tokens were drawn from a distribution. Greedy decoding has none."""
        return self.temperature >= SAMPLED_TEMPERATURE_MIN

    @property
    def logit_shift(self) -> LogitShift | None:
        """The penalties and the bias, or None without any."""
        if not (self.presence_penalty or self.frequency_penalty or any(self.logit_bias.values())):
            return None
        return LogitShift(
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
        )

    @property
    def untruncated(self) -> bool:
        """Whether tokens were sampled from the model's own softmax at this temperature, over all tokens."""
        return self.drawn and not self.truncated and self.grammar is None and self.logit_shift is None
