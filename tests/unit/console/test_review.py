"""Tests of ratings in a review queue: blind items, pairs, reservations, and verdicts published as feedback events."""

from __future__ import annotations

import re
import uuid

import httpx2
from sqlalchemy import select

from headrace_console.read_model import review_tables
from headrace_console.read_model.verdicts import (
    feedback_id,
    is_repeated_pair,
    item_id,
    verdict_of,
)
from headrace_runtime.errors import Refused
from headrace_schemas import Event, Feedback, Turn
from headrace_schemas.values.ids import session_key
from tests.support.turns import START
from tests.unit.console.support import (
    BY_PAGE,
    Bus,
    Stand,
    bus,
    make_queue,
    next_item,
    rate,
    session_of,
    stand,
    token_of,
)

__all__ = ["bus", "stand"]
SECRETS = (
    "m@", "9f8e7d6c5b4a", "candidate", "0.4321", "0.1234", "judge", "looks wrong", "bob", "chatcmpl", "private-"
)  # fmt: skip
"""Texts of an item that a rater must not see: version, arm, score, judge, reason, other rater, response and session."""


def verdict_of_bob(call: Event) -> Feedback:
    """Return another rater's verdict about the session of `call` in the queue `help`."""
    assert isinstance(call, Turn)
    item = item_id(call.tenant, "help", call.session_key)
    return Feedback(
        time=START, feedback_id=feedback_id(item, "bob", 1, repeated=False), source="review:help", rater="bob",
        session_key=call.session_key, msg_ids=(call.turn_id,), level="turn", value=0.1234, tenant=call.tenant,
    )  # fmt: skip


async def test_two_hundred_blind_items_contain_nothing_but_texts(stand: Stand, bus: Bus) -> None:
    sessions = [session_of(number) for number in range(200)]
    await bus.add([event for events in sessions for event in (*events, verdict_of_bob(events[0]))])
    _, queue = await make_queue(stand)
    rater = await stand.signed_in("rater")
    reply, seen = await rater.post(f"{queue}/next", data={"form_token": await token_of(rater)}, headers=BY_PAGE), set()
    while (item := reply.headers["location"]) != queue:
        page = await rater.get(item)
        assert page.status_code == 200
        (number,) = re.findall(r"question ([0-9]+)<", page.text)
        seen.add(number)
        content = f"{item} {page.headers} {reply.headers} {page.text}"
        for secret in (*SECRETS, session_key("default", f"private-{number}")):
            assert secret not in content, secret
        reply = await rate(rater, item, "skip")
    assert len(seen) == 200
    assert re.search(
        "judge|bob", (await (await stand.signed_in()).get("/s/" + session_key("default", "private-1"))).text
    )


async def test_verdict_is_feedback_that_the_gateway_accepts_and_the_console_reads_back(stand: Stand, bus: Bus) -> None:
    await bus.add(session_of(1))
    _, queue = await make_queue(stand)
    rater = await stand.signed_in("rater")
    item = await next_item(rater, queue)
    reply = await rate(rater, item, "0.25")
    assert (reply.status_code, reply.headers["location"]) == (303, queue), "no item is left"
    (event,) = bus.verdicts()
    assert (event.source, event.rater, event.value, event.level) == ("review:help", "rater", 0.25, "turn")
    assert event.session_key == session_key("default", "private-1")
    verdict = verdict_of(event)
    assert verdict is not None
    assert (verdict.name.hex(), verdict.number, verdict.answer) == (item.rpartition("/")[2], 1, "0.25")
    async with stand.console.database.transaction() as tx:
        (row,) = (await tx.execute(select(review_tables.verdicts))).mappings()
    assert (row["answer"], row["log_offset"]) == ("0.25", len(bus.events) - 1)
    page = (await rater.get(item)).text
    assert "You answered: <strong>rather bad</strong>" in page


async def test_double_send_counts_once_and_a_later_answer_is_a_revision(stand: Stand, bus: Bus) -> None:
    await bus.add(session_of(1))
    _, queue = await make_queue(stand)
    rater = await stand.signed_in("rater")
    item = await next_item(rater, queue)
    for answer in ("1", "1", "0"):
        assert (await rate(rater, item, answer)).status_code == 303
    assert len({event.event_id for event in bus.verdicts()}) == 1
    assert {event.value for event in bus.verdicts()} == {1.0}
    assert (await rate(rater, item, "0", number=2)).status_code == 303
    assert (await rate(rater, item, "0", number=9)).status_code == 409
    assert [event.value for event in bus.verdicts()][-1] == 0
    assert len({event.event_id for event in bus.verdicts()}) == 2
    page = (await rater.get(queue)).text
    assert "1 of 1 item rated by you" in page


async def test_undo_withdraws_the_answer_and_shows_the_item_again(stand: Stand, bus: Bus) -> None:
    await bus.add([*session_of(1), *session_of(2)])
    _, queue = await make_queue(stand)
    rater = await stand.signed_in("rater")
    first = await next_item(rater, queue)
    second = (await rate(rater, first, "1")).headers["location"]
    page = (await rater.get(second)).text
    assert f'action="{first}"' in page, "the page of the next item offers to undo the last answer"
    assert (await rate(rater, first, "undo", number=2)).headers["location"] == first
    assert bus.verdicts()[-1].withdrawn
    assert "You answered" not in (await rater.get(first)).text
    assert (await rate(rater, first, "0", number=3)).headers["location"] == second
    assert (await rate(rater, second, "undo")).status_code == 400, "nothing was answered"


async def test_refused_verdict_is_not_counted_and_the_item_stays(stand: Stand, bus: Bus) -> None:
    await bus.add([*session_of(1), *session_of(2)])
    _, queue = await make_queue(stand)
    rater = await stand.signed_in("rater")
    item = await next_item(rater, queue)
    bus.problem = Refused(503, "gateway_away", "The gateway does not answer.")
    assert (await rate(rater, item, "1")).status_code == 503
    assert "0 of 2 items rated by you" in (await rater.get(queue)).text
    bus.problem = None
    assert await next_item(rater, queue) == item
    assert (await rate(rater, item, "1")).status_code == 303
    assert "1 of 2 items rated by you" in (await rater.get(queue)).text


async def test_reservation_holds_a_place_until_it_expires_and_loses_no_verdict(stand: Stand, bus: Bus) -> None:
    await bus.add(session_of(1))
    reviewer, queue = await make_queue(stand, ratings="1", reserved_s="60")
    rater = await stand.signed_in("rater")
    item = await next_item(rater, queue)
    assert await next_item(reviewer, queue) == queue, "the only place is reserved"
    stand.clock.now_s += 61
    assert await next_item(reviewer, queue) == item
    assert await next_item(rater, queue) == item, "an open item is resumed"
    assert (await rate(rater, item, "1")).status_code == 303
    assert (await rate(reviewer, item, "0")).status_code == 303
    assert {event.rater: event.value for event in bus.verdicts()} == {"rater": 1.0, "reviewer": 0.0}


async def test_each_item_gets_as_many_raters_as_the_queue_asks_for(stand: Stand, bus: Bus) -> None:
    await bus.add([event for number in range(5) for event in session_of(number)])
    _, queue = await make_queue(stand, ratings="2")
    for role, rated in (("rater", 5), ("reviewer", 5), ("operator", 0)):
        client = await stand.signed_in(role)  # type: ignore[arg-type]
        item, number = await next_item(client, queue), 0
        while item != queue:
            item, number = (await rate(client, item, "1")).headers["location"], number + 1
        assert number == rated


async def test_skipped_items_come_back_on_request(stand: Stand, bus: Bus) -> None:
    await bus.add([*session_of(1), *session_of(2)])
    _, queue = await make_queue(stand)
    rater = await stand.signed_in("rater")
    first = await next_item(rater, queue)
    second = (await rate(rater, first, "skip")).headers["location"]
    assert second not in (first, queue)
    assert (await rate(rater, second, "skip")).headers["location"] == queue
    assert "Rate the 2 items that you skipped" in (await rater.get(queue)).text
    assert await next_item(rater, queue) == queue
    assert await next_item(rater, queue, skipped="1") == first
    assert not bus.verdicts()


async def make_pairs(stand: Stand, bus: Bus, number: int) -> tuple[httpx2.AsyncClient, str]:
    await bus.add([session_of(at, answers=1 + 2 * (at % 2))[0] for at in range(number)])
    await make_queue(stand, question="pair")
    return await stand.signed_in("rater"), "/review/1"


def sides_of(page: str) -> tuple[str, str]:
    """Return the texts of the sides A and B on a page."""
    match = re.search(
        r'aria-label="A">.*?<pre class="text">(.*?)</pre>.*?aria-label="B">.*?<pre class="text">(.*?)</pre>',
        page,
        re.DOTALL,
    )
    assert match is not None
    return match[1], match[2]


async def test_pair_becomes_a_preference_for_the_shown_side(stand: Stand, bus: Bus) -> None:
    rater, queue = await make_pairs(stand, bus, 20)
    item, sides = await next_item(rater, queue), set()
    for _ in range(10):
        texts = sides_of((await rater.get(item)).text)
        earlier = len(bus.verdicts())
        reply = await rate(rater, item, "A")
        assert reply.status_code == 303
        (event,) = bus.verdicts()[earlier:]
        assert event.preference is not None
        chosen, rejected = event.preference.chosen.choice, event.preference.rejected.choice
        assert (texts[0][-1], texts[1][-1]) == (str(chosen), str(rejected))
        sides.add(chosen < rejected)
        item = reply.headers["location"]
    assert item == queue, "turns with one answer are no pairs"
    assert sides == {True, False}, "the side does not depend on the answer"


async def test_change_from_a_side_to_both_bad_withdraws_the_preference(stand: Stand, bus: Bus) -> None:
    rater, queue = await make_pairs(stand, bus, 2)
    item = await next_item(rater, queue)
    for number, answer in enumerate(("A", "B", "bad", "same", "undo"), 1):
        assert (await rate(rater, item, answer, number=number)).status_code == 303, answer
    forms = [
        (event.withdrawn, event.feedback_kind, event.label, event.level, event.choice is not None)
        for event in bus.verdicts()
    ]
    assert forms == [
        (False, "preference", None, None, False),
        (False, "preference", None, None, False),
        (False, "value", "bad", "response", True),
        (False, "value", "bad", "response", True),
        (True, "preference", None, None, False),
        (False, "value", "same", "turn", False),
        (True, "value", None, "response", True),
        (True, "value", None, "response", True),
        (True, "value", None, "turn", False),
    ]
    assert len({event.event_id for event in bus.verdicts()}) == len(forms)


async def test_pair_that_comes_again_has_swapped_sides_and_is_kept_apart(stand: Stand, bus: Bus) -> None:
    rater, queue = await make_pairs(stand, bus, 100)
    item, first, again = await next_item(rater, queue), dict[str, tuple[str, str]](), list[str]()
    while item != queue:
        texts = sides_of((await rater.get(item)).text)
        if item in first:
            assert texts == first[item][::-1]
            again.append(item)
        first.setdefault(item, texts)
        item = (await rate(rater, item, "A", number=1 + again.count(item))).headers["location"]
    names = {str(uuid.UUID(hex=path.rpartition("/")[2])) for path in again}
    repeated_names = {
        name for path in first if is_repeated_pair(name := str(uuid.UUID(hex=path.rpartition("/")[2])), "rater")
    }
    assert names
    assert names <= repeated_names
    assert len(again) == len(set(again))
    async with stand.console.database.transaction() as tx:
        rows = (await tx.execute(select(review_tables.verdicts).where(review_tables.verdicts.c.repeated))).all()
    assert len(rows) == len(again)
