"""Context of one request for its parsers: limits, strictness, and the fields that are ignored."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pydantic import ValidationInfo

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.settings import RequestRules

if TYPE_CHECKING:
    from headrace_gateway.requests.chat_messages import KnownMessages
    from headrace_gateway.requests.response_store import CallerResponses
from headrace_schemas.events.turn import ResponseRecord
from headrace_schemas.values.text import printable

IGNORED_HEADER = "x-headrace-ignored"
"""The response header that names the fields without an effect."""
_CONTEXT_KEY = "request"
_NAMES_MAX = 32
"""Most ignored fields that one response names; the header must stay short."""
_NAME_LENGTH_MAX = 64
_TRANSLATION_GROWTH = 4
"""Most JSON values of a chat request that one value of another API may become."""


@dataclass(slots=True)
class RequestContext:
    """Rules for one request, and the fields that were accepted without an effect."""

    rules: RequestRules
    bytes_max: int
    """Most bytes of a request's body, and of a conversation with everything that it refers to."""
    responses: CallerResponses | None = None
    """Stored responses that the request may refer to."""
    known_messages: KnownMessages | None = None
    """Messages of earlier requests of the tenant."""
    referred_bytes: int = 0
    """Bytes of the conversation that the body refers to, once it was read."""
    record: ResponseRecord | None = None
    """The place of the call among responses that its client may refer to, once the body was read."""
    _ignored: dict[str, None] = field(default_factory=dict)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of the ignored fields without duplicates, in the order of the request."""
        return tuple(self._ignored)

    def ignore(self, name: str, reason: str = "it has no effect here") -> None:
        """Record that the field `name` has no effect.

        Raises:
            ApiError: 400, `gateway.strict` is set.
        """
        if self.rules.strict:
            message = f"{printable(name)}: {reason}, and gateway.strict refuses such fields; leave the field out"
            raise ApiError(400, "unsupported_field", message, name)
        self.report(name)

    def report(self, name: str) -> None:
        """Record that the field `name` has no effect, even if the settings refuse such fields."""
        if len(self._ignored) < _NAMES_MAX:
            self._ignored[name[:_NAME_LENGTH_MAX]] = None

    def for_translation(self) -> RequestContext:
        """Return the context for the chat request that a request of another API becomes.

        Its JSON may hold more values than the body did.
        """
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
        """Return the validation context that carries this object through pydantic."""
        return {_CONTEXT_KEY: self}


def context_of(info: ValidationInfo) -> RequestContext:
    """Return the context of the request that pydantic validates, or a context with strict rules if there is none."""
    context = (info.context or {}).get(_CONTEXT_KEY)
    return context if isinstance(context, RequestContext) else RequestContext(RequestRules(128, 0, strict=True), 0)


def header_value(ignored: tuple[str, ...]) -> str:
    """Return the value of the header `x-headrace-ignored`: printable ASCII, names separated by commas."""
    names = (name.encode("ascii", "replace").decode() for name in ignored)
    return ", ".join("".join(char if char.isalnum() or char in "._-" else "_" for char in name) for name in names)


def metric_label(name: str) -> str:
    """Return the metric label of an ignored field: its top-level name if that is a known name, else `other`."""
    head = name.partition(".")[0]
    return head if head in _LABELS else "other"


_LABELS = frozenset(
    ("store", "service_tier", "verbosity", "reasoning_effort", "reasoning", "thinking", "include", "truncation",
     "client_metadata", "context_management", "output_config", "cache_control", "tools", "messages", "system", "input",
     "max_tokens", "media", "text", "prediction", "provider", "response_format")
)  # fmt: skip
