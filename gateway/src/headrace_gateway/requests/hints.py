"""Fields that change no recorded distribution: honoured if the chat template supports them, else accepted and
reported."""

from __future__ import annotations

from typing import Any

from pydantic import JsonValue

from headrace_gateway.requests.request_context import RequestContext

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
    "include": "the answer holds all that there is",
    "client_metadata": "metadata is what a turn can be labelled with",
    "context_management": "the client manages its context",
    "moderation": "there is no moderation",
    "prompt_cache_options": "prefixes are cached without being asked",
    "cache_control": "prefixes are cached without being asked",
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
"""Hints of OpenAI, Anthropic, vLLM, OpenRouter and Ollama, with the reason why each has no effect here."""

MESSAGE_HINTS = frozenset(
    ("id", "status", "phase", "annotations", "cache_control", "metadata", "reasoning_details", "thinking_blocks",
     "provider_specific_fields")
)  # fmt: skip
"""Fields that clients add to the messages that they send back."""
_THINKING_OFF = ("none", "minimal")
ENABLE_THINKING = "enable_thinking"
"""The variable of chat templates that switches thinking (Qwen, GLM and others)."""


def thinking_switch(fields: dict[str, Any], context: RequestContext) -> bool | None:
    """Return whether the `fields` of a request switch thinking on or off, or None without such a field.

    Settings of the fields that no chat template can honour are reported to `context`.
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


def is_honoured(name: str, value: JsonValue) -> bool:
    """Return whether the field switches thinking and has no other effect."""
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
