"""Tests of the lists of dead letters: groups, states and permissions. Integration tests retry and discard them."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_console.read_model import tables
from headrace_schemas import DeadLetter, DeadLetterDecision, Event
from tests.support.account_events import START, letter, turn
from tests.support.remembered import make_tables
from tests.unit.console.support import BY_PAGE, Stand, form_token
from tests.unit.console.test_sessions import apply

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
