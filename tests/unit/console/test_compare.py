"""Two turns side by side."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace_schemas import Message
from headrace_schemas.values.ids import response_id
from tests.unit.console.support import Stand
from tests.unit.console.test_learned import FIRST, Session, saved
from tests.unit.console.test_sessions import HOSTILE, KEY, TURN_ID, foreign_events
from tests.unit.console.test_tokens import answer, fill, sampled


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    async with Stand(tmp_path, tenants=("default",)) as opened:
        yield opened


async def test_page_shows_both_answers_and_what_training_made_of_them(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, other = Session("a"), response_id(KEY)
    (turn_id,) = session.turn_ids
    hostile = answer((3, 4), (-1.0, -3.0), message=Message(role="assistant", content=f"left {HOSTILE}"))
    left = sampled((1, 2), hostile, turn_id=turn_id, session_key=session.key)
    right = sampled((1, 2), answer((5,), (-0.5,)), turn_id=other, version=FIRST)
    different = sampled((1, 9), answer((5,), (-0.5,)), turn_id=TURN_ID)
    events = [left, *session.events[1:], right, different, saved(FIRST, 3, session.outcome(-0.5))]
    await fill(stand, events, monkeypatch)
    client = await stand.signed_in()
    page = (await client.get("/compare", params={"left": turn_id, "right": other})).text
    first, second = page.split("<section")[1:]
    for text in ("left &lt;script&gt;", "mean probability 0.135", "This answer was pushed down, advantage -0.5, by"):
        assert text in first, text
    for text in (FIRST[:14], "mean probability 0.607", "No step has trained this answer"):
        assert text in second, text
    assert "Both prompts have the same tokens." in page
    assert "<script>alert" not in page
    assert "\u202e" not in page
    page = (await client.get("/compare", params={"left": turn_id, "right": TURN_ID})).text
    assert "The prompts have different tokens." in page


async def test_page_without_ids_is_a_form_and_with_one_id_shows_its_turn(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(stand, [sampled((1,), answer((3,), (-0.5,)))], monkeypatch)
    client = await stand.signed_in()
    assert "Enter two response ids" in (await client.get("/compare")).text
    page = (await client.get("/compare", params={"left": TURN_ID})).text
    assert f'value="{TURN_ID}"' in page
    assert page.count("<section") == 1


async def test_turn_of_another_tenant_answers_like_an_unknown_one(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = foreign_events()
    await fill(stand, [sampled((1,), answer((3,), (-0.5,))), *events], monkeypatch)
    client = await stand.signed_in()
    replies = [
        await client.get("/compare", params={"left": TURN_ID, "right": name})
        for name in (events[0].event_id, response_id(KEY), "x")
    ]
    assert {reply.status_code for reply in replies} == {404}
    assert len({reply.text for reply in replies}) == 1
    assert (await client.get("/compare?middle=x")).status_code == 400
    rater = await stand.signed_in("rater")
    assert (await rater.get("/compare")).status_code == 403
