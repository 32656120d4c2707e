"""Context for parsing one request: limits, strictness, ignored fields, and the switch of the model's thinking."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue, ValidationInfo

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.settings import RequestRules
from headrace_schemas.events.turn import ResponseRecord
from headrace_schemas.values.text import printable

if TYPE_CHECKING:
    from headrace_gateway.requests.chat_messages import TenantMessages
    from headrace_gateway.requests.response_store import CallerResponses


IGNORED_HEADER = "x-headrace-ignored"
"""The response header that names the fields without an effect."""
_CONTEXT_KEY = "request"
_NAMES_MAX = 32
"""Maximum number of ignored fields in one response header."""
_NAME_LENGTH_MAX = 64
_TRANSLATION_GROWTH = 4
"""Maximum number of JSON values of a chat request that one value of another API is translated to."""


@dataclass(slots=True)
class RequestContext:
    """Limits for parsing one request, stored conversations that it may refer to, and the list of its fields without
    effect."""

    rules: RequestRules
    bytes_max: int
    """Maximum bytes of the request body, and of a conversation with all stored items that it refers to."""
    responses: CallerResponses | None = None
    """Stored responses that the request may refer to."""
    known_messages: TenantMessages | None = None
    """Cached messages of earlier requests of the tenant."""
    referred_bytes: int = 0
    """Bytes of the stored conversation that the body refers to, set while the body is parsed."""
    record: ResponseRecord | None = None
    """Id, predecessor and conversation of the call in the Responses API, set while the body is parsed."""
    _ignored: dict[str, None] = field(default_factory=dict)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of the ignored fields without duplicates, in the order of the request."""
        return tuple(self._ignored)

    def ignore(self, name: str, reason: str = "it has no effect here") -> None:
        """Record that the field `name` has no effect, for the given `reason`.

        Raises:
            ApiError: 400, `gateway.strict` is set.
        """
        if self.rules.strict:
            message = f"{printable(name)}: {reason}, and gateway.strict refuses such fields; leave the field out"
            raise ApiError(400, "unsupported_field", message, name)
        self.report(name)

    def report(self, name: str) -> None:
        """Record that the field `name` has no effect, even if `gateway.strict` is set."""
        if len(self._ignored) < _NAMES_MAX:
            self._ignored[name[:_NAME_LENGTH_MAX]] = None

    def for_translation(self) -> RequestContext:
        """Return a context with a larger limit on JSON values, for parsing the chat request to which a request of
        another API was translated."""
        rules = replace(self.rules, json_values_max=_TRANSLATION_GROWTH * self.rules.json_values_max)
        return replace(self, rules=rules)

    def media_text(self, kind: str) -> str:
        """Return the text that replaces an image, a sound or a file of type `kind`.

        Raises:
            ValueError: The settings refuse such parts.
        """
        if self.rules.media == "refuse":
            raise ValueError(
                f"parts of type {kind[:40]!r} are not supported, only text is; "
                "gateway.media = 'placeholder' replaces such parts by a text"
            )
        self.report(f"media.{kind}")
        return f"[{kind} omitted: this model reads text only]"

    def for_validation(self) -> dict[str, RequestContext]:
        """Return the pydantic validation context that contains this object."""
        return {_CONTEXT_KEY: self}


def context_of(info: ValidationInfo) -> RequestContext:
    """Return the request context of a pydantic validation, or a context with strict rules if there is none."""
    context = (info.context or {}).get(_CONTEXT_KEY)
    return context if isinstance(context, RequestContext) else RequestContext(RequestRules(128, 0, strict=True), 0)


def header_value(ignored: tuple[str, ...]) -> str:
    """Return the value of the header `x-headrace-ignored`: printable ASCII, names separated by commas."""
    names = (name.encode("ascii", "replace").decode() for name in ignored)
    return ", ".join("".join(char if char.isalnum() or char in "._-" else "_" for char in name) for name in names)


def metric_label(name: str) -> str:
    """Return the label of an ignored field in the metrics: its top-level name if that is in `_LABELS`, else `other`."""
    head = name.partition(".")[0]
    return head if head in _LABELS else "other"


_LABELS = frozenset(
    ("store", "service_tier", "verbosity", "reasoning_effort", "reasoning", "thinking", "include", "truncation",
     "client_metadata", "context_management", "output_config", "cache_control", "tools", "messages", "system", "input",
     "max_tokens", "media", "text", "prediction", "provider", "response_format")
)  # fmt: skip


HINTS: dict[str, str] = {
    "store": "responses are not stored; the captured turns are",
    "service_tier": "there is one tier",
    "verbosity": "there is no such setting; write it in a message",
    "reasoning_effort": "chat templates have no levels of effort; 'none' and 'minimal' switch thinking off",
    "reasoning": "chat templates have no levels of effort; effort 'none' and 'minimal' switch thinking off",
    "thinking": "chat templates have no thinking budget; type 'disabled' switches thinking off",
    "enable_thinking": "it must be true or false",
    "thinking_budget": "chat templates have no thinking budget",
    "include_reasoning": "reasoning is always part of the answer",
    "prediction": "replicas do not decode from a prediction",
    "truncation": "a prompt that is too long is refused and never cut",
    "include": "the answer always has all its fields",
    "client_metadata": "only metadata labels a turn",
    "context_management": "the client manages its context",
    "moderation": "there is no moderation",
    "prompt_cache_options": "prefixes are always cached",
    "cache_control": "prefixes are always cached",
    "access_programs": "there are no access programs",
    "output_config": "chat templates have no levels of effort",
    "speed": "there is one speed",
    "inference_geo": "replicas run where the operator runs them",
    "diagnostics": "the answer has no diagnostics",
    "user_profile_id": "metadata.user_id names the user",
    "workspace_id": "the API key names the tenant",
    "provider": "replicas of Headrace serve the model",
    "transforms": "prompts are not transformed",
    "route": "replicas of Headrace serve the model",
    "plugins": "there are no plugins",
    "usage": "usage is always part of the answer",
    "num_ctx": "the replica sets the context",
    "keep_alive": "the routing decides which models are loaded",
    "priority": "the gateway shares places fairly",
    "request_id": "the gateway names the response",
    "skip_special_tokens": "texts never hold special tokens",
    "spaces_between_special_tokens": "texts never hold special tokens",
    "stream_options": "events are not padded",
}
"""Optional fields of OpenAI, Anthropic, vLLM, OpenRouter and Ollama that have no effect here, each with the reason."""

MESSAGE_HINTS = frozenset(
    ("id", "status", "phase", "annotations", "cache_control", "metadata", "reasoning_details", "thinking_blocks",
     "provider_specific_fields")
)  # fmt: skip
"""Fields without effect that clients add to messages they send back."""
_THINKING_OFF = ("none", "minimal")
ENABLE_THINKING = "enable_thinking"
"""Variable of chat templates (Qwen, GLM and others) that switches thinking on or off."""


def thinking_switch(fields: dict[str, Any], context: RequestContext) -> bool | None:
    """Return whether the `fields` of a request switch thinking on or off, or None if no field does.

    Values that no chat template can apply, such as a thinking budget, are recorded in `context` as ignored.
    """
    if isinstance(fields.get(ENABLE_THINKING), bool):
        return bool(fields[ENABLE_THINKING])
    switch: bool | None = None
    for name, key in (("reasoning_effort", None), ("reasoning", "effort"), ("output_config", "effort")):
        value = fields.get(name)
        effort = value.get(key) if key and isinstance(value, dict) else value
        if isinstance(effort, str) and effort in _THINKING_OFF:
            switch = False
    for name in ("reasoning", "thinking"):
        value = fields.get(name)
        if isinstance(value, dict):
            switch = _declared(value, switch)
            for budget in ("budget_tokens", "max_tokens"):
                if value.get(budget):
                    context.ignore(f"{name}.{budget}", HINTS["thinking_budget"])
    return switch


def is_thinking_switch(name: str, value: JsonValue) -> bool:
    """Return whether a request field only switches thinking on or off. The gateway applies such a field completely."""
    if name == ENABLE_THINKING:
        return isinstance(value, bool)
    if name == "thinking":
        return isinstance(value, dict) and value.get("type") in ("enabled", "adaptive", "disabled")
    if name == "reasoning_effort":
        return value in _THINKING_OFF
    if name == "reasoning" and isinstance(value, dict):
        rest = {key: setting for key, setting in value.items() if setting is not None}
        return bool(rest) and all(
            (key == "effort" and setting in _THINKING_OFF) or (key == "enabled" and isinstance(setting, bool))
            for key, setting in rest.items()
        )
    return False


def _declared(value: dict[str, Any], switch: bool | None) -> bool | None:
    if value.get("type") == "disabled" or value.get("enabled") is False:
        return False
    if value.get("type") == "enabled" or value.get("enabled") is True:
        return True
    return switch
