"""Tests of review: blind items, pairs, reservations, verdicts published as feedback, and the agreement of raters."""

from __future__ import annotations

import random
import re
import uuid
from collections import Counter

import httpx2
from sqlalchemy import select

from headrace_console.agreement import COLUMNS_MAX, COMMON_MIN, agreement_of
from headrace_console.pages.review_queues import habits_of
from headrace_console.read_model import review_tables
from headrace_console.read_model.queues import queue_of
from headrace_console.read_model.ratings import random_items
from headrace_console.read_model.verdicts import (
    SAME,
    feedback_id,
    is_repeated_pair,
    item_id,
    pair_of,
    sides_of,
    verdict_of,
)
from headrace_console.settings import Scope, User
from headrace_runtime.errors import Refused
from headrace_schemas import Event, Feedback, Reward, Turn
from headrace_schemas.events.opinion import ComparedAnswer, Preference
from headrace_schemas.values.ids import session_key
from headrace_statistics.agreement import alpha, kappa, squared
from tests.support.turns import START
from tests.unit.console.support import (
    BY_PAGE,
    Bus,
    Stand,
    bus,
    make_queue,
    next_item,
    rate,
    scores,
    session_of,
    stand,
    token_of,
    verdict,
)

__all__ = ["bus", "stand"]
SECRETS = (
    "m@", "9f8e7d6c5b4a", "candidate", "0.4321", "0.1234", "judge", "looks wrong", "bob", "chatcmpl", "private-"
)  # fmt: skip
"""Texts of an item that a rater must not see: version, arm, score, judge, reason, other rater, response and session."""
OPERATOR = User("ann", "operator", Scope(), "")


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


def texts_of_sides(page: str) -> tuple[str, str]:
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
        texts = texts_of_sides((await rater.get(item)).text)
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
        texts = texts_of_sides((await rater.get(item)).text)
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


async def test_page_shows_the_coefficients_of_the_random_part(stand: Stand, bus: Bus) -> None:
    events, table = scores(400)
    await bus.add(events)
    reviewer, queue = await make_queue(stand)
    async with stand.console.database.transaction() as tx:
        opened = await queue_of(tx, OPERATOR, 1)
        assert opened is not None
        items = await random_items(tx, opened)
    assert 50 < len(items) < 120, "a fifth of the sessions"
    rows = {item.session_key: item.by_rater for item in items}
    expected = {event.session_key: table[int(event.session_id[8:])] for event in events if isinstance(event, Turn)}
    assert all(answers == expected[key] for key, answers in rows.items())
    page = (await reviewer.get(f"{queue}/agreement")).text
    of_all = alpha(Counter(tuple(sorted(row.values(), key=str)) for row in rows.values()), squared)
    assert of_all is not None
    assert f"alpha of all raters: {of_all:.3f} (95 %: " in page
    for first, second in (("ann", "ben"), ("ann", "cat"), ("ben", "cat")):
        common = Counter((row[first], row[second]) for row in rows.values() if first in row and second in row)
        of_two, equal = kappa(common, squared), sum(n for (a, b), n in common.items() if a == b)
        assert of_two is not None
        rest = f'{common.total()}</td><td class="number">{100 * equal / common.total():.1f} %</td><td>{of_two:.3f} (95'
        assert re.search(
            rf"({first}</th><td>{second}|{second}</th><td>{first})</td><td class=\"number\">{re.escape(rest)}", page
        )
    judged = Counter(row["ann"] for row in rows.values() if "ann" in row)
    assert f"{100 * judged[1.0] / judged.total():.1f} %" in page
    assert "judge:help" in page, "the judge is one more column"
    assert "Different answers" in page


async def test_few_common_items_have_no_number(stand: Stand, bus: Bus) -> None:
    events, _ = scores(60)
    await bus.add(events)
    reviewer, queue = await make_queue(stand)
    page = (await reviewer.get(f"{queue}/agreement")).text
    assert page.count("too few (") >= 3
    assert "0.000" not in page


async def test_raters_cannot_open_the_agreement(stand: Stand, bus: Bus) -> None:
    await bus.add(scores(3)[0])
    _, queue = await make_queue(stand)
    assert (await (await stand.signed_in("rater")).get(f"{queue}/agreement")).status_code == 403
    viewer = await stand.signed_in()
    assert (await viewer.get(f"{queue}/agreement")).status_code == 200
    assert (await viewer.get("/review/999/agreement")).status_code == 404


async def test_page_of_a_queue_without_verdicts_says_so(stand: Stand, bus: Bus) -> None:
    await bus.add(session_of(1))
    reviewer, queue = await make_queue(stand)
    page = (await reviewer.get(f"{queue}/agreement")).text
    assert "Fewer than two raters or judges have answered" in page


async def test_pairs_show_the_share_of_a_side_and_answers_to_repeated_pairs(stand: Stand, bus: Bus) -> None:
    sessions = [session_of(number, answers=3) for number in range(100)]
    events, expected = [event for session in sessions for event in session], Counter[str]()
    for session in sessions:
        call = session[0]
        assert isinstance(call, Turn)
        item = item_id("default", "help", call.session_key)
        for rater, repeated in (("ann", False), ("ben", False), ("ben", True)):
            first, second = sides_of(item, 3, rater, repeated=repeated)
            chosen, rejected = (first, second) if rater == "ann" else pair_of(item, 3)
            compared = (ComparedAnswer(turn_id=call.turn_id, choice=choice) for choice in (chosen, rejected))
            preference = Preference(chosen=next(compared), rejected=next(compared))
            events.append(verdict(call, rater, number=1 + repeated, repeated=repeated, preference=preference))
        events += [
            Reward(
                time=START, trajectory_id=f"T{call.turn_id}", session_key=call.session_key,
                source="judge:pair", turn_id=call.turn_id, choice=choice, value=value,
            )
            for choice, value in enumerate((0.2, 0.2, 0.9))
        ]  # fmt: skip
    await bus.add(events)
    reviewer, queue = await make_queue(stand, question="pair")
    async with stand.console.database.transaction() as tx:
        opened = await queue_of(tx, OPERATOR, 1)
        assert opened is not None
        items = await random_items(tx, opened)
    habits = {habit.rater: habit for habit in habits_of(items)}
    assert (habits["ann"].left, habits["ann"].decided) == (len(items), len(items))
    assert (habits["ben"].consistent, habits["ben"].repeated) == (len(items), len(items))
    assert 0 < habits["ben"].left < len(items)
    for answered in items:
        expected[SAME if 2 not in pair_of(answered.id, 3) else "2"] += 1
    assert Counter(answered.by_judge["judge:pair"] for answered in items) == expected
    page = (await reviewer.get(f"{queue}/agreement")).text
    assert f"{len(items)} of {len(items)} (95 %: " in page
    assert "answer 3" in page


def test_agreement_is_bounded_and_keeps_judges_apart() -> None:
    draws = random.Random(1)
    names = [f"r{number}" for number in range(12)]
    answers = {str(item): {name: draws.choice("ab") for name in [*names, "judge:x"]} for item in range(COMMON_MIN)}
    agreement = agreement_of(answers, ["judge:x"], are_scores=False, seed=1)
    assert len(agreement.columns) == COLUMNS_MAX
    assert "judge:x" not in agreement.columns, "raters come first"
    answers = {item: {**row, "judge:x": "a"} for item, row in answers.items()}
    few = {item: {name: row[name] for name in ("r0", "r1", "judge:x")} for item, row in answers.items()}
    agreement = agreement_of(few, ["judge:x"], are_scores=False, seed=1)
    assert agreement.alpha.value == alpha(Counter(tuple(sorted((row["r0"], row["r1"]))) for row in few.values()))
    assert [pair.second for pair in agreement.pairs].count("judge:x") == 2
    one_less = dict(list(few.items())[1:])
    agreement = agreement_of(one_less, [], are_scores=False, seed=1)
    assert agreement.alpha.has_too_few_items
    assert agreement.alpha.value is None
    assert all(pair.raw is None for pair in agreement.pairs)
