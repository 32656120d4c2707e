"""Identity of a call: its session, task, run and purpose, each from the first source that names it, and whether it is a
side call.

Coding agents send calls that are not part of the task in the session of the task, for example to create a title, a
memory or a summary. Such a side call is identified by a header or by a text of the settings, or assumed if the call
offers no tools. The collector checks that assumption against the other calls of the session.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue
from starlette.types import Scope

from headrace_gateway.access.keys import Caller
from headrace_gateway.access.refusals import ApiError
from headrace_gateway.requests import http_request
from headrace_schemas import Message, SubAgent
from headrace_schemas.events.trajectory import NO_TOOLS
from headrace_schemas.events.turn import Purpose, SessionSource
from headrace_schemas.values import ids
from headrace_schemas.values.ids import decode_name, is_name

SIDE_CALL_HEADER = b"x-headrace-side-call"
AGENT_HEADER, PARENT_HEADER = b"x-headrace-agent-id", b"x-headrace-parent-agent-id"
SESSION_HEADERS = (b"x-claude-code-session-id", b"session-id", b"thread-id", b"x-session-affinity")
"""Headers in which Claude Code, Codex CLI and other agents send the id of their session."""
_NOT_A_SIDE_CALL = "no"
_CODEX_KIND = b"x-openai-subagent"
_CODEX_SIDE_CALLS = ("compact", "memory_consolidation")
"""Values of Codex CLI's header for calls that summarize or store the session."""
_PURPOSES: dict[str, Purpose] = {"train": "train", "eval": "eval", "shadow": "eval"}
"""Purpose in the event for each purpose in a request. A shadow is an evaluation with a `shadow_of`, so that old readers
of turns understand it."""
PURPOSE_HEADER = b"x-headrace-purpose"
_SESSION_KEY = r"[a-z2-7]{16}"
CLIENT_SESSION = "headrace_client_session"
"""Key of `metadata` under which parsers store a session id that a client sends in another field."""


def side_call(
    headers: Mapping[bytes, bytes], patterns: Mapping[str, str], messages: tuple[Message, ...], *, has_tools: bool
) -> str | None:
    """Return the kind of a side call (for example `title`), or None for a call that is part of the task.

    Args:
        headers: The headers of the request.
        patterns: Kinds of side calls, each with a text that the first or the last message of such a call contains.
        messages: The messages of the request.
        has_tools: Whether the request offers tools.

    Raises:
        ApiError: 400, the kind in the header is not a valid name.
    """
    header = headers.get(SIDE_CALL_HEADER)
    if header is not None:
        kind = decode_name(header)
        if not is_name(kind):
            message = "X-Headrace-Side-Call: must be the kind of the call, such as title, or no"
            raise ApiError(400, "invalid_value", message, "X-Headrace-Side-Call")
        return None if kind == _NOT_A_SIDE_CALL else kind
    codex_kind = decode_name(headers.get(_CODEX_KIND, b""))
    if codex_kind in _CODEX_SIDE_CALLS or b"x-openai-memgen-request" in headers:
        return codex_kind or "memory"
    if patterns:
        texts = (messages[0].text, messages[-1].text)
        for kind, pattern in patterns.items():
            if any(pattern in text for text in texts):
                return kind
    is_of_an_agent = any(name in headers for name in SESSION_HEADERS)
    return NO_TOOLS if is_of_an_agent and not has_tools else None


def sub_agent(headers: Mapping[bytes, bytes]) -> SubAgent | None:
    """Return the sub-agent that the headers of a call identify, or None. Headers without a valid name are ignored."""
    for agent_header, parent_header in (
        (AGENT_HEADER, PARENT_HEADER),
        (b"x-claude-code-agent-id", b"x-claude-code-parent-agent-id"),
    ):
        agent = _name(headers, agent_header)
        if agent is not None:
            return SubAgent(agent=agent, parent=_name(headers, parent_header))
    parent, thread, session = (
        _name(headers, name) for name in (b"x-codex-parent-thread-id", b"thread-id", b"session-id")
    )
    if parent is None or thread is None:
        return None
    return SubAgent(agent=thread, parent=None if parent == session else parent)


def _name(headers: Mapping[bytes, bytes], header: bytes) -> str | None:
    name = decode_name(headers[header]) if header in headers else None
    return name if name is not None and is_name(name) else None


@dataclass(frozen=True, slots=True)
class CallIdentity:
    """Session and labels of a call, from its key, its headers and its body."""

    tenant: str
    session_id: str
    session_key: str
    source: SessionSource
    task_id: str | None
    run_id: str | None
    purpose: Purpose
    user_key: str | None = None
    """Key of the user whom the call names, derived like a session key, or None. Only rollouts by user need it."""
    shadow_of: str | None = None
    """Session key of the call that this shadow call repeats with another version, or None."""


@dataclass(frozen=True, slots=True)
class RequestMetadata:
    """Labels by which a client assigns a request to sessions, tasks and runs: its `X-` headers, and the field
    `metadata` of its body.
    """

    headers: Mapping[bytes, bytes]
    metadata: Mapping[str, JsonValue]

    def label(self, name: str) -> str | None:
        """Return the value of the header for `name`, such as `X-Session-Id`, else that of `metadata`, or None. Raises
        `ApiError` 400."""
        header = self.headers.get(b"x-" + name.replace("_", "-").encode())
        if header is not None:
            return label(decode_name(header), f"X-{name.replace('_', '-').title()}")
        return label(self.metadata.get(name), f"metadata.{name}")

    def client_session(self) -> tuple[str, SessionSource] | None:
        """Return the session id that an agent sends in its own header or field, with its source, or None.

        An invalid id is ignored, because it serves only to group calls. The session that a key is bound to has
        precedence.
        """
        for header in SESSION_HEADERS:
            if header in self.headers and is_name(name := decode_name(self.headers[header])):
                return name, "header"
        value = self.metadata.get(CLIENT_SESSION)
        return (value, "metadata") if isinstance(value, str) and is_name(value) else None

    def purpose(self) -> Purpose:
        purpose = _PURPOSES.get(self._purpose) if isinstance(self._purpose, str) else None
        if purpose is None:
            raise ApiError(400, "invalid_value", "purpose: must be 'train', 'eval' or 'shadow'", "purpose")
        return purpose

    def shadow_of(self) -> str | None:
        """Return the key of the session that a shadow call repeats, or None. Raises `ApiError` 400.

        The purpose `shadow` and `shadow_of` must be sent together.
        """
        key = self.label("shadow_of")
        if (self._purpose == "shadow") != (key is not None):
            raise ApiError(400, "invalid_value", "shadow_of: goes with purpose 'shadow', and only with it", "shadow_of")
        if key is not None and not re.fullmatch(_SESSION_KEY, key):
            raise ApiError(400, "invalid_value", "shadow_of: must be the key of a session", "shadow_of")
        return key

    @property
    def _purpose(self) -> JsonValue:
        header = self.headers.get(PURPOSE_HEADER)
        return self.metadata.get("purpose", "train") if header is None else decode_name(header)


def label(value: JsonValue, where: str) -> str | None:
    """Check a label, and return it as a text. Numbers become texts; None stays None. Raises `ApiError` 400."""
    if value is None:
        return None
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not is_name(text):
        raise ApiError(400, "invalid_value", f"{where}: must be 1 to 512 characters without control characters", where)
    return text


def identify(
    caller: Caller,
    scope: Scope,
    metadata: RequestMetadata,
    model: str,
    messages: tuple[Message, ...],
    user: JsonValue = None,
    cache_key: JsonValue = None,
) -> CallIdentity:
    """Return the identity of a chat call. `model` is the requested model, not the version that will serve.

    `user` is OpenAI's field of that name; `X-User-Id` and `metadata.user_id` have precedence. `cache_key` is OpenAI's
    `prompt_cache_key`: calls with different keys belong to different conversations.
    """
    named = metadata.label("user_id") or (user if isinstance(user, str) else None)
    purpose = metadata.purpose()
    parts = (f"{purpose} {model}", named or "", cache_key if isinstance(cache_key, str) else "")
    use = json.dumps(parts) if any("\0" in part for part in parts) else "\0".join(parts)
    session_id, source = _session(caller, scope, metadata, use, messages)
    return CallIdentity(
        tenant=caller.tenant,
        session_id=session_id,
        session_key=ids.session_key(caller.tenant, session_id),
        source=source,
        task_id=metadata.label("task_id"),
        run_id=metadata.label("run_id"),
        purpose=purpose,
        user_key=ids.session_key(caller.tenant, f"user:{named}") if named else None,
        shadow_of=metadata.shadow_of(),
    )


def _session(
    caller: Caller, scope: Scope, metadata: RequestMetadata, use: str, messages: tuple[Message, ...]
) -> tuple[str, SessionSource]:
    if caller.session_id is not None:
        where = "metadata.session_id"
        caller.check_session(label(metadata.metadata.get("session_id"), where), where)
    named = metadata.label("session_id")
    if named is not None:
        return named, "header" if b"x-session-id" in metadata.headers else "metadata"
    in_path = label(scope.get(http_request.SESSION), "the session in the path")
    if in_path is not None:
        return in_path, "path"
    if caller.session_id is not None:
        return caller.session_id, "key"
    client_session = metadata.client_session()
    if client_session is not None:
        return client_session
    return _implied(caller, use, messages), "implicit"


def _implied(caller: Caller, use: str, messages: tuple[Message, ...]) -> str:
    """Return the id of the implicit session of a call without a session id.

    The id is a digest of the messages before the first answer, the key, purpose, model, user and the cache key of the
    prompt. System prompts do not count, because they may contain the time. Runs with equal openings share the session,
    and the collector divides them.
    """
    digest = hashlib.sha256(f"{caller.key_id}\0{use}".encode("utf-8", "surrogatepass"))
    first = opening(messages)
    for message in [message for message in first if message.role not in ("system", "developer")] or first:
        digest.update(message.model_dump_json(exclude_none=True).encode())
    return f"implicit-{digest.hexdigest()[:32]}"


def opening(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the messages before the first answer, by which calls of one implicit session are recognized.

    The first answer is the first assistant message after a user message. If there is none, all messages are returned.
    Several user messages may precede the first answer, because agents put the state of their environment before the
    task.
    """
    has_user = False
    for at, message in enumerate(messages):
        has_user = has_user or message.role == "user"
        if has_user and message.role == "assistant":
            return messages[:at]
    return messages
