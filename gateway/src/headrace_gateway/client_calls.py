"""The role of a call within its client's session: side calls, and calls of sub-agents.

Coding agents send calls that are no part of the task in the session of the task: a title, a memory, a summary. Such a
side call is known by a header, by a text of the settings, or by a guess because it offers no tools. The collector
checks the guess against the other calls of the session.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace_gateway.refusals import ApiError
from headrace_schemas import Message, SubAgent
from headrace_schemas.events.trajectory import NO_TOOLS
from headrace_schemas.values.ids import decode_name, is_name

SIDE_CALL_HEADER = b"x-headrace-side-call"
AGENT_HEADER, PARENT_HEADER = b"x-headrace-agent-id", b"x-headrace-parent-agent-id"
SESSION_HEADERS = (b"x-claude-code-session-id", b"session-id", b"thread-id", b"x-session-affinity")
"""Headers in which Claude Code, Codex CLI and other agents send their session."""
_NOT_A_SIDE_CALL = "no"
_CODEX_KIND = b"x-openai-subagent"
_CODEX_SIDE_CALLS = ("compact", "memory_consolidation")
"""Values of Codex CLI's header for calls that work on the session itself."""


def side_call(
    headers: Mapping[bytes, bytes], patterns: Mapping[str, str], messages: tuple[Message, ...], *, has_tools: bool
) -> str | None:
    """Return the kind of a side call, or None for a call that is part of the task.

    Args:
        headers: The headers of the request.
        patterns: Kinds of side calls, each with a text that the first or the last message of such a call contains.
        messages: The messages of the request.
        has_tools: Whether the request offers tools.

    Raises:
        ApiError: 400, the kind in the header is no name.
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
    """Return the sub-agent that the headers of a call name, or None. Headers without a valid name are ignored."""
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
