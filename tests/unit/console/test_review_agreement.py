"""Tests of the agreement between the raters of a queue: the statistics, and the users who may open the page."""

from __future__ import annotations

import random
import re
from collections import Counter

from headrace_console.agreement import COLUMNS_MAX, COMMON_MIN, agreement_of
from headrace_console.pages.review_queues import habits_of
from headrace_console.read_model.queues import queue_of
from headrace_console.read_model.ratings import random_items
from headrace_console.read_model.verdicts import SAME, feedback_id, item_id, pair_of, sides_of
from headrace_console.users import Scope, User
from headrace_schemas import Event, Feedback, Reward, Turn
from headrace_schemas.events.opinion import ComparedAnswer, Preference
from headrace_statistics.agreement import alpha, kappa, squared
from tests.support.turns import START
from tests.unit.console.support import Bus, Stand, bus, make_queue, session_of, stand

__all__ = ["bus", "stand"]
OPERATOR = User("ann", "operator", Scope(), "")
RATERS = ("ann", "ben", "cat")


def verdict(call: Event, rater: str, *, number: int = 1, repeated: bool = False, **answer: object) -> Feedback:
    """Return the verdict of `rater` about the session of `call` in the queue `help`."""
    assert isinstance(call, Turn)
    item = item_id(call.tenant, "help", call.session_key)
    fields = {"level": "turn", **answer} if "preference" not in answer else answer
    return Feedback.model_validate(
        {
            "time": START, "feedback_id": feedback_id(item, rater, number, repeated=repeated), "source": "review:help",
            "rater": rater, "session_key": call.session_key, "msg_ids": (call.turn_id,), **fields,
        }
    )  # fmt: skip


def scores(sessions: int) -> tuple[list[Event], dict[int, dict[str, float]]]:
    """Return events and scores by session and rater. Some scores are missing, and the judge rounds up to 0.5."""
    draws, events, table = random.Random(5), list[Event](), dict[int, dict[str, float]]()
    for number in range(sessions):
        session = session_of(number)
        events += session
        truth = draws.randrange(5)
        table[number] = {
            rater: (truth if draws.random() < 0.7 else draws.randrange(5)) / 4
            for rater in RATERS
            if draws.random() < 0.8
        }
        events += [verdict(session[0], rater, value=value) for rater, value in table[number].items()]
    return events, table


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
