"""Tests of review queues: permissions, sampling of sessions, labels and texts."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import pytest
from sqlalchemy import select

from headrace_console.read_model import review_tables
from headrace_console.read_model.batch import Batch, LogEvent
from headrace_console.read_model.rows import Names
from headrace_console.read_model.verdicts import (
    belongs_to_the_random_part,
    item_id,
)
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.database import Database
from headrace_schemas import Feedback
from headrace_schemas.values.ids import session_key
from tests.support.remembered import make_tables, recorded, scans
from tests.support.turns import START
from tests.unit.console.support import (
    BY_PAGE,
    QUEUE,
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
from tests.unit.console.test_sessions import HOSTILE

__all__ = ["bus", "stand"]


async def test_rater_sees_only_queues_for_the_rater(stand: Stand, bus: Bus) -> None:
    await bus.add(session_of(1))
    reviewer, other = await make_queue(stand, raters="ann, bob")
    _, visible = await make_queue(stand, name="own", raters="rater")
    rater = await stand.signed_in("rater")
    page = (await rater.get("/review")).text
    assert (f'href="{visible}"' in page, f'href="{other}"' in page) == (True, False)
    item = await next_item(reviewer, other)
    unknown = await rater.get("/review/999")
    for path in (other, item, f"{visible}/{item.rpartition('/')[2]}", f"{visible}/{'0' * 32}", "/review/x"):
        reply = await rater.get(path)
        assert reply.status_code == unknown.status_code == 404
    for path in (f"{other}/next", item):
        assert (await rate(rater, path, "1")).status_code in (400, 404)
    assert not bus.verdicts()


async def test_roles_decide_who_rates_and_who_makes_queues(stand: Stand, bus: Bus) -> None:
    await bus.add(session_of(1))
    _, queue = await make_queue(stand)
    viewer, rater = await stand.signed_in("viewer"), await stand.signed_in("rater")
    for client in (viewer, rater):
        assert (await client.get("/review/new")).status_code == 403
        form = {"form_token": await token_of(client), **QUEUE, "name": "more"}
        assert (await client.post("/review/new", data=form, headers=BY_PAGE)).status_code == 403
        close = {"form_token": await token_of(client)}
        assert (await client.post(f"{queue}/close", data=close, headers=BY_PAGE)).status_code == 403
    assert (await viewer.get(queue)).status_code == 200
    refused = await viewer.post(f"{queue}/next", data={"form_token": await token_of(viewer)}, headers=BY_PAGE)
    assert refused.status_code == 403
    page = (await rater.get(queue)).text
    assert "Progress</h2>" not in page
    assert 'action="/find"' not in page
    assert 'href="/sessions"' not in page


async def test_rater_arrives_at_the_queues_after_login(stand: Stand) -> None:
    for role, home in (("rater", "/review"), ("viewer", "/")):
        reply = await stand.client().post("/login", data={"token": role}, headers=BY_PAGE)
        assert reply.headers["location"] == home


async def test_closed_queue_offers_no_item(stand: Stand, bus: Bus) -> None:
    await bus.add([*session_of(1), *session_of(2)])
    reviewer, queue = await make_queue(stand)
    rater = await stand.signed_in("rater")
    item = await next_item(rater, queue)
    form = {"form_token": await token_of(reviewer)}
    assert (await reviewer.post(f"{queue}/close", data=form, headers=BY_PAGE)).status_code == 303
    assert (await rate(rater, item, "1")).headers["location"] == queue, "an open item may be finished"
    assert "The queue is closed" in (await rater.get(queue)).text


async def test_read_only_console_takes_no_verdict(tmp_path: Path, bus: Bus) -> None:
    async with Stand(tmp_path) as writable:
        bus.stand = writable
        await bus.add(session_of(1))
        _, queue = await make_queue(writable)
        rater = await writable.signed_in("rater")
        item = await next_item(rater, queue)
    async with Stand(tmp_path, read_only=True) as stand:
        rater = await stand.signed_in("rater")
        for path in (f"{queue}/next", item):
            assert (await rate(rater, path, "1")).status_code == 403
        theme = {"form_token": await token_of(rater), "theme": "dark", "next": "/review"}
        assert (await rater.post("/theme", data=theme, headers=BY_PAGE)).status_code == 303
    assert not bus.verdicts()


async def test_queues_of_other_tenants_do_not_exist(tmp_path: Path, bus: Bus) -> None:
    async with Stand(tmp_path) as everywhere:
        bus.stand = everywhere
        await bus.add([*session_of(1), *session_of(1, tenant="other")])
        reviewer, queue = await make_queue(everywhere, tenant="other")
        item = await next_item(reviewer, queue)
        assert "question 1" in (await reviewer.get(item)).text
        reply = await rate(reviewer, item, "1")
        assert (reply.status_code, "gateway_keys" in reply.text) == (403, True), "no key of the tenant is set"
    async with Stand(tmp_path, tenants=("default",)) as stand:
        bus.stand = stand
        client = await stand.signed_in("reviewer")
        unknown = await client.get("/review/999")
        for path in (queue, item):
            reply = await client.get(path)
            bodies = {answer.text.replace(answer.url.path, "") for answer in (reply, unknown)}
            assert (reply.status_code, len(bodies)) == (404, 1)
        assert f'href="{queue}"' not in (await client.get("/review")).text
        form = {"form_token": await token_of(client), **QUEUE, "tenant": "other", "name": "mine"}
        assert (await client.post("/review/new", data=form, headers=BY_PAGE)).status_code == 404


async def test_a_fifth_of_a_filtered_queue_is_drawn_at_random(stand: Stand, bus: Bus) -> None:
    events = [session_of(number)[0] for number in range(200)]
    up = [
        Feedback(
            time=START,
            feedback_id=f"u{at}",
            session_key=session_key("default", f"private-{at}"),
            session_id=f"private-{at}",
            value=1,
        )
        for at in range(0, 200, 2)
    ]
    await bus.add([*events, *up])
    reviewer, queue = await make_queue(stand, thumb="up", items_max="60")
    for _ in range(60):
        item = await next_item(reviewer, queue)
        if item == queue:
            break
        await rate(reviewer, item, "skip")
    async with stand.console.database.transaction() as tx:
        rows = (await tx.execute(select(review_tables.items))).mappings().all()
    at_random = [row for row in rows if row["drawn_at_random"]]
    assert len(rows) == 60
    assert len(at_random) >= 12
    assert all(belongs_to_the_random_part(str(uuid.UUID(bytes=row["name"]))) for row in at_random)
    liked = {item_id("default", "help", session_key("default", f"private-{at}")) for at in range(0, 200, 2)}
    assert all(row["drawn_at_random"] or str(uuid.UUID(bytes=row["name"])) in liked for row in rows)
    assert len({row["position"] for row in rows}) == 60


async def test_verdicts_are_computed_again_from_the_topic(stand: Stand, bus: Bus, tmp_path: Path) -> None:
    await bus.add([event for number in range(3) for event in session_of(number)])
    _, queue = await make_queue(stand)
    rater = await stand.signed_in("rater")
    item = await next_item(rater, queue)
    for answer in ("1", "0.5", "0"):
        item = (await rate(rater, item, answer)).headers["location"]
    columns = [column for column in review_tables.verdicts.c if column.name != "session"]
    async with stand.console.database.transaction() as tx:
        stored = sorted(map(tuple, await tx.execute(select(*columns))))
    rebuilt = Database.open("again", Common(data_dir=tmp_path / "again"))
    await make_tables(rebuilt, "headrace_console")
    log_events = [LogEvent(event, 0, at) for at, event in enumerate(bus.events)]
    for part in (log_events[::-1], log_events):
        async with rebuilt.transaction() as tx:
            await Batch(tx, Names(), titles=True, day=20_000).apply(part)
    async with rebuilt.transaction() as tx:
        assert sorted(map(tuple, await tx.execute(select(*columns)))) == stored
        names = set((await tx.execute(select(review_tables.items.c.name))).scalars())
    assert names == {row[0] for row in stored}
    await rebuilt.close()


async def test_queries_of_a_queue_use_indexes(stand: Stand, bus: Bus) -> None:
    await bus.add([event for number in range(30) for event in session_of(number, answers=2)])
    with recorded(stand.console.database) as statements:
        reviewer, queue = await make_queue(stand, question="pair", thumb="down")
        item = await next_item(reviewer, queue)
        for answer in ("A", "skip", "B"):
            assert (await reviewer.get(item)).status_code == 200
            item = (await rate(reviewer, item, answer)).headers["location"]
        for path in ("/review", queue):
            assert (await reviewer.get(path)).status_code == 200
    assert len(statements.found) > 20
    async with stand.console.database.transaction() as tx:
        problems = await scans(tx, statements, partial=frozenset(), rows_max=1_000)
    assert [
        text
        for text in problems
        if not re.match(r"SCAN ([0-9]+ CONSTANT ROWS|(names|positions|counts|schema_version)\b)", text)
    ] == []


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": "Help me"}, "name"),
        ({"name": ""}, "name"),
        ({"rubric": " "}, "rubric"),
        ({"question": "essay"}, "question"),
        ({"question": "label", "labels": "one"}, "labels"),
        ({"question": "label", "labels": "undo, two"}, "labels"),
        ({"question": "label", "labels": ",".join(map(str, range(10)))}, "labels"),
        ({"question": "pair", "about": "session"}, "about"),
        ({"question": "edit", "about": "session"}, "about"),
        ({"ratings": "6"}, "ratings"),
        ({"items_max": "2001"}, "items_max"),
        ({"reserved_s": "1"}, "reserved_s"),
        ({"thumb": "sideways"}, "thumb"),
        ({"metric": "x"}, "metric"),
    ],
)
async def test_form_of_a_queue_refuses_a_wrong_field_by_name(
    stand: Stand, bus: Bus, fields: dict[str, str], field: str
) -> None:
    await bus.add(session_of(1))
    reviewer = await stand.signed_in("reviewer")
    form = {"form_token": await token_of(reviewer), **QUEUE, **fields}
    reply = await reviewer.post("/review/new", data=form, headers=BY_PAGE)
    assert reply.status_code == 400
    assert field in reply.text
    assert "No queue yet" in (await reviewer.get("/review")).text


async def test_labels_and_answers_about_the_session_reach_the_gateway(stand: Stand, bus: Bus) -> None:
    await bus.add(session_of(1))
    reviewer, queue = await make_queue(stand, question="label", labels="polite, rude", about="session")
    item = await next_item(reviewer, queue)
    assert (await rate(reviewer, item, "kind")).status_code == 400
    assert (await rate(reviewer, item, "polite")).status_code == 303
    (event,) = bus.verdicts()
    assert (event.label, event.session_id, event.msg_ids) == ("polite", "private-1", ())
    assert (await rate(reviewer, item, "undo", number=2)).status_code == 303
    assert bus.verdicts()[-1].withdrawn


async def test_edits_of_a_queue_are_feedback_whose_text_is_in_the_event_alone(stand: Stand, bus: Bus) -> None:
    await bus.add([event for number in range(2) for event in session_of(number)])
    reviewer, queue = await make_queue(stand, question="edit")
    rater = await stand.signed_in("rater")
    item = await next_item(rater, queue)
    page = (await rater.get(item)).text
    answer = re.findall(r"<textarea id=\"text\"[^>]*>\n([^<]*)</textarea>", page)
    assert answer in (["reply 0 number 0"], ["reply 1 number 0"]), "the form begins with the answer"
    form = {"form_token": await token_of(rater), "answer": "edited", "number": "1"}
    assert (await rater.post(item, data={**form, "text": " "}, headers=BY_PAGE)).status_code == 400
    reply = await rater.post(item, data={**form, "text": "secret edit"}, headers=BY_PAGE)
    second = reply.headers["location"]
    assert second not in (item, queue)
    assert (await rate(rater, second, "same")).headers["location"] == queue
    edit, same = bus.verdicts()
    assert edit.edit is not None
    assert (edit.edit.text, edit.feedback_kind, same.label, same.level) == ("secret edit", "edit", "same", "turn")
    async with stand.console.database.transaction() as tx:
        rows = (await tx.execute(select(review_tables.verdicts))).mappings().all()
    assert sorted(row["answer"] for row in rows) == ["edited", "same"], "the console stores no text of an edit"
    assert "edited" in (await reviewer.get(f"{queue}/agreement")).text
    assert (await rate(rater, item, "undo", number=2)).headers["location"] == item
    assert (bus.verdicts()[-1].withdrawn, bus.verdicts()[-1].feedback_kind) == (True, "edit")
    assert (await rate(rater, item, "A", number=3)).status_code == 400


async def test_hostile_texts_are_shown_escaped(stand: Stand, bus: Bus) -> None:
    await bus.add(session_of(1, text=f"{HOSTILE}<button hx-get='/x' data-key='1'>"))
    reviewer, queue = await make_queue(stand, rubric=f"{HOSTILE} ok?")
    item = await next_item(reviewer, queue)
    for path in ("/review", queue, item):
        page = (await reviewer.get(path)).text
        assert "<script>alert" not in page
        assert "hx-get='/x'" not in page
        assert "\\u202eevil" in page
