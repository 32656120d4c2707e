"""Tests of forms that change other services: feedback through the gateway, and decisions on dead letters."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

from headrace_console.pages.feedback import feedback_body
from headrace_console.pages.session import feedback_outcomes
from headrace_console.read_model import tables
from headrace_console.read_model.follower import RecordReader
from headrace_console.settings import Scope, User
from headrace_console.sources import clients
from headrace_console.sources.clients import GatewayClient
from headrace_gateway.access.keys import Caller
from headrace_gateway.requests.feedback import events_of
from headrace_gateway.requests.feedback_request import FeedbackRequest
from headrace_gateway.settings import LimitSettings
from headrace_runtime.errors import Refused
from headrace_schemas import DeadLetter, DeadLetterDecision, Event, Feedback, Message
from tests.support.remembered import make_tables
from tests.support.turns import START, letter, turn
from tests.unit.console.support import BY_PAGE, Stand, form_token
from tests.unit.console.test_sessions import KEY, TURN_ID, apply, foreign_events, session_events

CALLER = Caller("k", "k", "default", frozenset({"feedback"}), None, LimitSettings())
PATH = f"/s/{KEY}/feedback"


class Gateway:
    """Substitute for the HTTP call to the gateway, which records the requests and answers with `reply`."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.reply: dict[str, Any] = {"event_ids": ["e"], "feedback_id": "f"}

    async def call(self, service: str, _method: str, url: str, headers: dict[str, str], content: bytes = b"") -> bytes:
        if service != "gateway":
            raise Refused(503, f"{service}_away", "Only the gateway answers.")
        self.requests.append((url, headers, json.loads(content)))
        return json.dumps(self.reply).encode()


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Gateway:
    stub = Gateway()
    monkeypatch.setattr(clients, "call", stub.call)
    return stub


@pytest.fixture
async def stand_with_turns(tmp_path: Path) -> AsyncIterator[Stand]:
    async with Stand(tmp_path) as opened:
        await apply(opened, [*session_events(), *foreign_events()])
        yield opened


async def turn_number(client: httpx2.AsyncClient) -> str:
    return (await client.get(f"/r/{TURN_ID}")).headers["location"].partition("#t-")[2]


@pytest.mark.parametrize(
    ("fields", "of_turn", "body"),
    [
        ({"action": "score", "value": "0.5"}, True, {"response_id": TURN_ID, "level": "turn", "value": 0.5}),
        (
            {"action": "score", "value": "1", "comment": "good"},
            False,
            {"session_id": "s1", "value": 1.0, "comment": "good"},
        ),
        (
            {"action": "edit", "text": "Ada.\r\nLovelace"},
            True,
            {"response_id": TURN_ID, "edit": {"role": "assistant", "content": "Ada.\nLovelace"}},
        ),
        ({"action": "withdraw_score"}, True, {"response_id": TURN_ID, "level": "turn", "withdrawn": True}),
        ({"action": "withdraw_score"}, False, {"session_id": "s1", "withdrawn": True}),
        ({"action": "withdraw_edit"}, True, {"response_id": TURN_ID, "withdrawn": True, "kind": "edit"}),
    ],
)
async def test_reviewer_sends_feedback_that_the_gateway_accepts(
    stand_with_turns: Stand, stub: Gateway, fields: dict[str, str], *, of_turn: bool, body: dict[str, Any]
) -> None:
    client = await stand_with_turns.signed_in("reviewer")
    turn = await turn_number(client) if of_turn else ""
    form = {"form_token": await form_token(client), "turn": turn, **fields}
    reply = await client.post(PATH, data=form, headers=BY_PAGE)
    assert reply.status_code == 200, reply.text
    ((url, _, sent),) = stub.requests
    assert url.endswith("/v1/feedback")
    assert sent == {**body, "source": "console", "rater": "reviewer"}
    (event,) = events_of(FeedbackRequest.model_validate(sent), CALLER, stand_with_turns.clock, body_bytes=1000)
    assert (event.session_key, event.source, event.rater) == (KEY, "console", "reviewer")
    assert event.msg_ids == ((TURN_ID,) if of_turn else ())


async def test_edited_tool_calls_reach_the_gateway_as_a_message(stand_with_turns: Stand, stub: Gateway) -> None:
    client = await stand_with_turns.signed_in("reviewer")
    calls = '[{"name": "look_up", "arguments": {"who": "Ada"}}]'
    form = {"form_token": await form_token(client), "turn": await turn_number(client), "action": "edit"}
    reply = await client.post(PATH, data={**form, "tool_calls": calls}, headers=BY_PAGE)
    assert reply.status_code == 200, reply.text
    request = FeedbackRequest.model_validate(stub.requests[0][2])
    assert request.edit is not None
    assert request.edit.tool_calls is not None
    assert request.edit.tool_calls[0].function.arguments == '{"who": "Ada"}'


async def test_page_states_why_feedback_trains_nothing(stand_with_turns: Stand, stub: Gateway) -> None:
    stub.reply |= {"teaches": False, "reason": "no_logprobs"}
    client = await stand_with_turns.signed_in("reviewer")
    form = {"form_token": await form_token(client), "action": "score", "value": "1"}
    page = (await client.post(PATH, data=form, headers=BY_PAGE)).text
    assert "trains nothing. Your agent samples with temperature=0" in page
    assert 'value="withdraw_score">Undo<' in page


async def test_only_own_valid_feedback_can_be_withdrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"msg_ids": (TURN_ID,), "rater": "reviewer"}
    score, edit = feedback(value=0.5, rater="reviewer"), feedback(edit=EDIT, **own)
    undone = feedback(kind="edit", withdrawn=True, **own)
    question = Message(role="user", content="Who sent it?")
    answered = turn(TURN_ID, session_key=KEY, session_id="s1", messages=(question,))
    log = [answered, score, feedback(value=1), edit, undone]
    readable: list[Event] = []

    async def read(_self: object, _topic: str, positions: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Event]:
        return {(partition, offset): readable[offset] for partition, offset in positions if offset < len(readable)}

    monkeypatch.setattr(RecordReader, "read", read)
    async with Stand(tmp_path) as stand_with_turns:
        await apply(stand_with_turns, log[:1])
        client = await stand_with_turns.signed_in("reviewer")
        turn_path = f"{PATH}?turn={await turn_number(client)}"
        assert "Withdraw my" not in (await client.get(turn_path)).text
        await apply(stand_with_turns, log[:4])
        assert "Withdraw my edit<" in (await client.get(turn_path)).text, "the bus does not answer"
        readable[:] = log[:4]
        of_session, of_turn = (await client.get(PATH)).text, (await client.get(turn_path)).text
        assert "Withdraw my score of 0.5<" in of_session
        assert "Withdraw my edit" not in of_session
        assert "Withdraw my edit<" in of_turn
        assert "Ada.</textarea>" in of_turn, "the user's edit takes the place of the answer"
        assert "Who sent it?" in of_turn, "the question stands above the forms"
        assert "Withdraw my score" not in of_turn
        readable[:] = log
        await apply(stand_with_turns, log)
        assert "Withdraw my" not in (await client.get(turn_path)).text


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"action": "score", "value": "2"}, 400),
        ({"action": "score", "value": "nan"}, 400),
        ({"action": "score"}, 400),
        ({"action": "edit", "text": "x"}, 400),
        ({"action": "delete"}, 400),
        ({"action": "score", "value": "1", "rater": "ann"}, 400),
        ({"action": "score", "value": "1", "comment": "x" * 2001}, 400),
        ({"action": "score", "value": "1", "turn": "999"}, 404),
        ({"action": "score", "value": "1", "turn": "x"}, 404),
    ],
)
async def test_form_with_an_invalid_field_sends_nothing(
    stand_with_turns: Stand, stub: Gateway, fields: dict[str, str], status: int
) -> None:
    client = await stand_with_turns.signed_in("reviewer")
    reply = await client.post(PATH, data={"form_token": await form_token(client), **fields}, headers=BY_PAGE)
    assert reply.status_code == status, reply.text
    assert not stub.requests


@pytest.mark.parametrize("calls", ["{", "[]", "{}", '[{"name": 1, "arguments": {}}]', '[{"name": "x"}]', "[" * 2000])
async def test_edit_refuses_invalid_tool_calls(calls: str) -> None:
    row = {"name": b"x" * 27}
    with pytest.raises(Refused, match="tool_calls"):
        feedback_body({"action": "edit", "tool_calls": calls}, {"session_id": "s"}, row)


async def test_feedback_needs_role_form_token_and_origin(stand_with_turns: Stand, stub: Gateway) -> None:
    viewer = await stand_with_turns.signed_in("viewer")
    form = {"form_token": await form_token(viewer), "action": "score", "value": "1"}
    assert (await viewer.post(PATH, data=form, headers=BY_PAGE)).status_code == 403
    assert (await viewer.get(PATH)).status_code == 403
    reviewer = await stand_with_turns.signed_in("reviewer")
    assert (await reviewer.post(PATH, data=form, headers=BY_PAGE)).status_code == 403
    valid_form = {**form, "form_token": await form_token(reviewer)}
    assert (await reviewer.post(PATH, data=valid_form, headers={"origin": "http://evil.example"})).status_code == 403
    assert not stub.requests
    assert (await reviewer.post(PATH, data=valid_form, headers=BY_PAGE)).status_code == 200


async def test_read_only_console_sends_no_feedback(tmp_path: Path, stub: Gateway) -> None:
    stand_with_turns = Stand(tmp_path, read_only=True)
    await make_tables(stand_with_turns.console.database, "headrace_console")
    await apply(stand_with_turns, session_events())
    client = await stand_with_turns.signed_in("reviewer")
    form = {"form_token": await form_token(client), "action": "score", "value": "1"}
    assert (await client.post(PATH, data=form, headers=BY_PAGE)).status_code == 403
    assert not stub.requests
    await stand_with_turns.console.close()


async def test_gateway_key_is_that_of_the_tenant(stub: Gateway) -> None:
    client = GatewayClient("http://gateway", {"other": "other-key"}, "internal")
    everyone = User("ann", "reviewer", Scope(None), "")
    await client.send(everyone, "default", {})
    await client.send(everyone, "other", {})
    assert [headers["authorization"] for _, headers, _ in stub.requests] == ["Bearer internal", "Bearer other-key"]
    with pytest.raises(Refused, match="gateway_keys"):
        await client.send(everyone, "third", {})
    with pytest.raises(Refused):
        await client.send(User("ann", "reviewer", Scope(frozenset({"other"})), ""), "default", {})
    assert len(stub.requests) == 2


def feedback(**more: Any) -> Feedback:
    fields = {"time": START, "session_key": KEY, "session_id": "s1", "source": "console", "rater": "ann", **more}
    return Feedback.model_validate({"feedback_id": f"f{sorted(more.items())}", **fields})


EDIT = Message(role="assistant", content="Ada.")
_WEIGHT_0 = "the weight of the source is 0, and only reward functions read it"
UNDONE_EDIT = feedback(msg_ids=("a",), kind="edit", withdrawn=True)


@pytest.mark.parametrize(
    ("events", "outcomes"),
    [
        ([feedback(value=1)], ["counted in the reward"]),
        ([feedback(value=1, metric="tone")], ["not matched yet"]),
        ([feedback(value=1), feedback(value=0)], ["superseded", "counted in the reward"]),
        ([feedback(value=1), feedback(value=0, rater="bob")], ["counted in the reward", "counted in the reward"]),
        ([feedback(value=1), feedback(withdrawn=True)], ["withdrawn", "in effect"]),
        ([feedback(edit=EDIT, msg_ids=("a",)), UNDONE_EDIT], ["withdrawn", "in effect"]),
        ([feedback(edit=EDIT, msg_ids=("a",))], ["passed to the trainer, whose algorithm decides"]),
        ([feedback(value=1, msg_ids=("b",))], ["trains nothing: eval"]),
        ([feedback(value=1, msg_ids=("a", "b"))], ["counted in the reward"]),
        ([feedback(value=0.25)], ["dead-lettered: unknown_target"]),
        ([feedback(comment="x")], ["attached to the session"]),
        ([feedback(value=1, source="free")], [f"no part of the reward: {_WEIGHT_0}"]),
    ],
)  # fmt: skip
def test_outcome_of_feedback(events: list[Feedback], outcomes: list[str]) -> None:
    refused = {feedback(value=0.25).event_id: "unknown_target"}
    weights = {"console": 1.0, "free": 0.0}
    stated = feedback_outcomes(
        events,
        counted=weights,
        untrained={"b": "eval"},
        refused=refused,
        weight=lambda source: weights.get(source, 1.0),
    )
    assert stated == outcomes


GROUP = "service=collector&topic=turns&reason=invalid_event"


def dead_letters(number: int) -> list[DeadLetter]:
    return [letter(turn(f"t{at}"), "collector") for at in range(number)]


def decision(about: DeadLetter, number: int, action: str) -> Event:
    fields = {"time": START, "dead_letter_id": about.event_id, "number": number, "action": action, "reason": "x"}
    return DeadLetterDecision.model_validate(fields)


@pytest.mark.parametrize("is_reversed", [False, True])
async def test_newest_decision_gives_the_state_in_any_order(stand: Stand, *, is_reversed: bool) -> None:
    first, second, third = dead_letters(3)
    events: list[Event] = [first, second, third, decision(first, 1, "retried")]
    events += [decision(first, 2, "discarded"), decision(second, 1, "retried")]
    await apply(stand, events[::-1] if is_reversed else events)
    client = await stand.signed_in("viewer")
    for state in tables.LETTER_STATES:
        page = (await client.get(f"/dead-letters?state={state}")).text
        assert '<td class="number">1</td>' in page, state


async def test_group_page_lists_letters_with_their_errors_escaped(stand: Stand) -> None:
    (about,) = dead_letters(1)
    await apply(stand, [about.model_copy(update={"error": "<script>alert(1)</script>"})])
    client = await stand.signed_in("viewer")
    page = (await client.get(f"/dead-letters/group?{GROUP.replace('invalid_event', about.reason)}")).text
    assert about.event_id[:8] in page
    assert "&lt;script&gt;" in page
    assert "Discard" not in page, "a viewer changes nothing"
    assert (await client.get(f"/dead-letters/{about.event_id}")).status_code == 200
    assert (await client.get("/dead-letters/unknown")).status_code == 404


@pytest.mark.parametrize(
    "path", ["/dead-letters", f"/dead-letters/group?{GROUP}", f"/dead-letters/plan?{GROUP}", "/dead-letters/x"]
)
async def test_user_of_some_tenants_sees_no_letter(tmp_path: Path, path: str) -> None:
    stand = Stand(tmp_path, tenants=("default",))
    await make_tables(stand.console.database, "headrace_console")
    client = await stand.signed_in("operator")
    assert (await client.get(path)).status_code == 403
    await stand.console.close()


@pytest.mark.parametrize("action", ["retry", "discard"])
async def test_change_needs_the_role_operator_and_a_group(stand: Stand, action: str) -> None:
    form = {"service": "collector", "topic": "turns", "kind": "invalid_event", "reason": "x"}
    reviewer = await stand.signed_in("reviewer")
    valid_form = {"form_token": await form_token(reviewer), **form}
    assert (await reviewer.post(f"/dead-letters/{action}", data=valid_form, headers=BY_PAGE)).status_code == 403
    operator = await stand.signed_in("operator")
    assert (await operator.post(f"/dead-letters/{action}", data=form, headers=BY_PAGE)).status_code == 403
    token = {"form_token": await form_token(operator), "reason": "x"}
    assert (await operator.post(f"/dead-letters/{action}", data=token, headers=BY_PAGE)).status_code == 400
    extra = {**form, **token, "ids": "1"}
    assert (await operator.post(f"/dead-letters/{action}", data=extra, headers=BY_PAGE)).status_code == 400


@pytest.mark.parametrize("query", ["state=lost", "state=open&order=x"])
async def test_list_refuses_unknown_parameters(stand: Stand, query: str) -> None:
    client = await stand.signed_in("viewer")
    assert (await client.get(f"/dead-letters?{query}")).status_code == 400
