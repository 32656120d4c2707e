"""Contexts in which tests parse the body of one call."""

from __future__ import annotations

from typing import Literal

from headrace_gateway.request_context import RequestContext
from headrace_gateway.settings import RequestRules

_BYTES_MAX = 8_388_608


def lenient(
    choices_max: int = 4, json_values_max: int = 10_000, *, media: Literal["refuse", "placeholder"] = "refuse"
) -> RequestContext:
    """Return a context that accepts hints."""
    return RequestContext(RequestRules(choices_max, json_values_max, media=media), _BYTES_MAX)


def strict(choices_max: int = 4, json_values_max: int = 10_000) -> RequestContext:
    """Return a context that refuses every field without an effect."""
    return RequestContext(RequestRules(choices_max, json_values_max, strict=True), _BYTES_MAX)
