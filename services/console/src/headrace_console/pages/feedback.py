"""Forms with which a reviewer scores and edits answers, and withdraws both."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from pydantic import JsonValue
from starlette.responses import Response

from headrace_console.flow_rules import describe_reason
from headrace_console.pages.frame import LINES_LENGTH_MAX
from headrace_console.pages.page import Page, Visit
from headrace_console.pages.session import message_text, message_values
from headrace_console.pages.turns import find_session, find_turn, read_turn
from headrace_console.read_model import queries
from headrace_console.read_model.packing import unpack_id
from headrace_console.read_model.queries import Row, position_of
from headrace_console.sources.clients import SOURCE
from headrace_runtime.errors import Refused
from headrace_schemas import Feedback, Message
from headrace_schemas.values.text import storable

ACTIONS = ("score", "edit", "withdraw_score", "withdraw_edit")
_FIELDS = frozenset({"action", "turn", "value", "text", "tool_calls", "comment"})
_COMMENT_LENGTH_MAX = 2_000
_FEEDBACK_MAX = 50
"""Number of a session's newest feedback events that are searched for the user's own."""
_ANSWER_LENGTH_MAX = 200_000
_MESSAGES_MAX = 3
"""Last messages of the prompt that are shown above the forms."""


async def form(visit: Visit) -> Response:
    """Show the forms for a session, or for one of its turns with its answer to edit."""
    session, turn = await _target(visit, visit.parameters("turn").get("turn", ""))
    event = await read_turn(visit, turn) if turn is not None else None
    own_feedback, is_complete = await _own_feedback(visit, session, turn)
    edit = own_feedback.get("edit")
    answer = edit.edit if edit is not None else event.choices[0].message if event is not None else None
    editable = editable_answer(answer) if answer is not None else None
    return visit.render(
        "feedback.html",
        session=session,
        turn=turn,
        messages=[message_values(message) for message in event.messages[-_MESSAGES_MAX:]] if event is not None else [],
        answers=[message_text(choice.message) for choice in event.choices] if event is not None else [],
        answer=editable or ("", ""),
        has_text=editable is not None,
        score=own_feedback.get("value"),
        edit=edit,
        unknown=not is_complete,
        algorithm=visit.parts.rules.algorithm,
    )


async def send(visit: Visit) -> Response:
    """Send feedback about a session, or about one of its turns."""
    form = await visit.fields(_FIELDS)
    session, turn = await _target(visit, form.get("turn", ""))
    reason = await visit.parts.gateway.send(visit.user, session["tenant_name"], feedback_body(form, session, turn))
    problem = describe_reason(reason) if reason else ""
    return visit.render("feedback_sent.html", session=session, turn=turn, action=form["action"], problem=problem)


async def _own_feedback(visit: Visit, session: Row, turn: Row | None) -> tuple[dict[str, Feedback], bool]:
    """Return the user's valid feedback about the turn or the session, and whether all of its events could be read.

    The feedback is keyed by its kind, such as score or edit.
    """
    async with visit.transaction() as tx:
        rows = await queries.feedback_of(tx, session["id"])
    events = await visit.parts.records.read_rows("feedback", rows[:_FEEDBACK_MAX])
    read = [event for row in rows if isinstance(event := events.get(position_of(row)), Feedback)]
    turn_id = unpack_id(turn["name"]) if turn is not None else None
    return valid_feedback(read, visit.user.name, turn_id), len(read) == len(rows)


def valid_feedback(newest_first: Iterable[Feedback], rater: str, turn_id: str | None) -> dict[str, Feedback]:
    """Return the latest feedback of a user about one object by its kind, such as score or edit, if it is not withdrawn.

    Args:
        newest_first: feedback about one session.
        rater: name of the user.
        turn_id: response id of the turn that the feedback is about, or None for the session.
    """
    last: dict[str, Feedback] = {}
    named = (turn_id,) if turn_id is not None else ()
    for event in newest_first:
        if (event.source, event.rater, event.msg_ids) == (SOURCE, rater, named):
            last.setdefault(event.feedback_kind, event)
    return {kind: event for kind, event in last.items() if not event.withdrawn}


async def _target(visit: Visit, number: str) -> tuple[Row, Row | None]:
    """Return the rows of the session in the URL and of the turn with this number, or None for an empty number.

    Raises:
        NotFound: the user may see no such session or turn.
    """
    session = await find_session(visit)
    return session, await find_turn(visit, session, number) if number else None


def feedback_body(form: Mapping[str, str], session: Row, turn: Row | None) -> dict[str, JsonValue]:
    """Return the body of `POST /v1/feedback` for a form.

    Args:
        form: the fields of the form.
        session: the session.
        turn: the turn that the feedback is about, or None for the session.

    Raises:
        Refused: 400 for a field that is missing or that has a value that is not permitted.
    """
    action = form.get("action", "")
    if action not in ACTIONS:
        raise _refusal("action", f"must be one of {', '.join(ACTIONS)}")
    comment = storable(form.get("comment", "").strip())
    if len(comment) > _COMMENT_LENGTH_MAX:
        raise _refusal("comment", f"must have at most {_COMMENT_LENGTH_MAX:,} characters")
    body: dict[str, JsonValue] = {"comment": comment} if comment else {}
    if turn is not None:
        body["response_id"] = unpack_id(turn["name"])
    elif session["session_id"] is None or action in ("edit", "withdraw_edit"):
        raise _refusal("turn", "must be a turn of the session; only a turn has an answer to edit")
    else:
        body["session_id"] = session["session_id"]
    if action == "edit":
        return {**body, "edit": edited_answer(form)}
    if action == "withdraw_edit":
        return {**body, "withdrawn": True, "kind": "edit"}
    if turn is not None:
        body["level"] = "turn"
    return {**body, "withdrawn": True} if action == "withdraw_score" else {**body, "value": _score(form)}


def editable_answer(message: Message) -> tuple[str, str] | None:
    """Return text and tool calls of an answer for the form of an edit, or None if it is too long for a form."""
    text, tool_calls = message.text, _format_tool_calls(message)
    return (text, tool_calls) if max(len(text), len(tool_calls)) <= LINES_LENGTH_MAX else None


def _format_tool_calls(message: Message) -> str:
    """Return the tool calls of an answer as the JSON text that the form accepts, or an empty text without any."""
    calls = []
    for call in message.tool_calls or ():
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = call.function.arguments
        calls.append({"name": call.function.name, "arguments": arguments})
    return json.dumps(calls, indent=2, ensure_ascii=False) if calls else ""


def _score(form: Mapping[str, str]) -> float:
    try:
        value = float(form.get("value", ""))
    except ValueError:
        raise _refusal("value", "must be a number from 0 to 1") from None
    if not 0 <= value <= 1:
        raise _refusal("value", "must be a number from 0 to 1")
    return value


def edited_answer(form: Mapping[str, str]) -> JsonValue:
    """Return the edited answer of a form as a message with text, tool calls or both. Raises `Refused` 400."""
    text, calls = storable(form.get("text", "").replace("\r\n", "\n")), form.get("tool_calls", "").strip()
    if max(len(text), len(calls)) > _ANSWER_LENGTH_MAX:
        raise _refusal("text", f"must have at most {_ANSWER_LENGTH_MAX:,} characters")
    message: dict[str, JsonValue] = {"role": "assistant"}
    if text.strip():
        message["content"] = text
    if calls:
        message["tool_calls"] = _tool_calls(calls)
    if len(message) == 1:
        raise _refusal("text", "must contain the answer, unless there are tool calls")
    return message


def _tool_calls(text: str) -> list[JsonValue]:
    """Return tool calls from a JSON list of objects with `name` and `arguments`."""
    problem = 'must be a JSON list such as [{"name": "search", "arguments": {"query": "x"}}]'
    try:
        calls = json.loads(text)
    except (ValueError, RecursionError):
        raise _refusal("tool_calls", problem) from None
    if not isinstance(calls, list) or not 1 <= len(calls) <= 64:
        raise _refusal("tool_calls", problem)
    messages: list[JsonValue] = []
    for number, entry in enumerate(calls):
        if not isinstance(entry, dict) or entry.keys() != {"name", "arguments"}:
            raise _refusal("tool_calls", problem)
        name, arguments = entry["name"], entry["arguments"]
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise _refusal("tool_calls", problem)
        function: dict[str, JsonValue] = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        messages.append({"id": f"call_{number}", "type": "function", "function": function})
    return messages


def _refusal(field: str, problem: str) -> Refused:
    return Refused(400, "invalid_form", f"{field}: {problem}", field)


PAGES = (
    Page("/s/{key}/feedback", form, role="reviewer"),
    Page("/s/{key}/feedback", send, role="reviewer", method="POST"),
)
