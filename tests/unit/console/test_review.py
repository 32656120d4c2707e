"""Review queues: blind items, pairs, reservations, and verdicts that go back as feedback events."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import httpx2
import pytest
from sqlalchemy import select

from headrace_console.read_model import review_tables
from headrace_console.read_model.batch import Batch, Fact
from headrace_console.read_model.follower import RecordReader
from headrace_console.read_model.rows import Names
from headrace_console.read_model.verdicts import (
    belongs_to_the_random_part,
    comes_again,
    feedback_id,
    item_id,
    verdict_of,
)
from headrace_console.sources import gateway
from headrace_gateway.access import Caller
from headrace_gateway.feedback import events_of
from headrace_gateway.feedback_request import FeedbackRequest
from headrace_gateway.settings import LimitSettings
from headrace_runtime.errors import Refused
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.database import Database
from headrace_schemas import Choice, Event, Feedback, Message, Reward, Turn, UnitAssignment
from headrace_schemas.values.ids import response_id, session_key
from tests.support.account_events import START, trajectory, turn
from tests.support.migrated import make_tables
from tests.support.query_plans import recorded, scans
from tests.unit.console.support import BY_PAGE, Stand, form_token
from tests.unit.console.test_sessions import HOSTILE

SECRETS = (
    "m@", "9f8e7d6c5b4a", "candidate", "0.4321", "0.1234", "judge", "looks wrong", "bob", "chatcmpl", "private-"
)  # fmt: skip
"""Texts of an item that a rater must not see: version, arm, score, judge, reason, other rater, response and session."""
QUEUE = {"name": "help", "rubric": "Does it help?", "question": "score", "ratings": "2"}


class Bus:
    """Stands in for the topic `turns` and for the gateway: what the console sends, it reads back."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.requests: list[dict[str, Any]] = []
        self.problem: Refused | None = None
        self.stand: Stand | None = None

    async def read(self, _topic: str, positions: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Event]:
        return {position: self.events[position[1]] for position in positions}

    async def call(self, _service: str, _method: str, _url: str, headers: dict[str, str], content: bytes) -> bytes:
        if self.problem is not None:
            raise self.problem
        body = json.loads(content)
        self.requests.append(body)
        tenant = "other" if headers.get("authorization") == "Bearer other-key" else "default"
        caller = Caller("k", "k", tenant, frozenset({"feedback"}), None, LimitSettings())
        assert self.stand is not None
        request = FeedbackRequest.model_validate(body)
        await self.add(events_of(request, caller, self.stand.clock, body_bytes=1000))
        return json.dumps({"event_ids": ["e"], "feedback_id": "f"}).encode()

    async def add(self, events: Sequence[Event]) -> None:
        """Let the console read events."""
        assert self.stand is not None
        begin = len(self.events)
        self.events += events
        async with self.stand.console.database.transaction() as tx:
            facts = [Fact(event, 0, begin + at) for at, event in enumerate(events)]
            await Batch(tx, Names(), titles=True, day=20_000).apply(facts)

    def verdicts(self) -> list[Feedback]:
        return [event for event in self.events if isinstance(event, Feedback) and event.source.startswith("review:")]


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> Bus:
    stub = Bus()
    monkeypatch.setattr(gateway, "call", stub.call)
    monkeypatch.setattr(RecordReader, "read", lambda _self, topic, positions: stub.read(topic, positions))
    return stub


@pytest.fixture
async def stand(tmp_path: Path, bus: Bus) -> AsyncIterator[Stand]:
    async with Stand(tmp_path) as opened:
        bus.stand = opened
        yield opened


def session_of(number: int, *, answers: int = 1, tenant: str = "default", text: str = "") -> list[Event]:
    """Return a session with a turn in an arm, a judge's reward and the feedback of another rater."""
    key = session_key(tenant, f"private-{number}")
    name = response_id(key, uuid.UUID(int=number + 1))
    choices = tuple(
        Choice(
            index=at, token_ids=(3,), logprobs=(-0.5,), finish_reason="stop",
            message=Message(role="assistant", content=f"{text}reply {number} number {at}"),
        )
        for at in range(answers)
    )  # fmt: skip
    more: dict[str, Any] = {"session_key": key, "session_id": f"private-{number}", "tenant": tenant}
    call = turn(
        name, choices=choices, usage={"prompt_tokens": 2, "completion_tokens": answers}, version="m@9f8e7d6c5b4a",
        messages=(Message(role="user", content=f"{text}question {number}"),), time=START + timedelta(seconds=number),
        assignment=UnitAssignment(rollouts=("r",), arm="candidate", unit="u", propensity="1/2"), **more,
    )  # fmt: skip
    run = {"trajectory_id": f"T{tenant}{number}", "session_key": key, "tenant": tenant, "time": START}
    return [
        call,
        trajectory(f"T{tenant}{number}", (name,), **more),
        Reward(source="judge:help", value=0.4321, reason="looks wrong", **run),
        Feedback(
            time=START, feedback_id=f"b{tenant}{number}", rater="bob", value=0.1234, comment="looks wrong", **more
        ),
    ]


_tokens: WeakKeyDictionary[httpx2.AsyncClient, str] = WeakKeyDictionary()


async def token_of(client: httpx2.AsyncClient) -> str:
    """Return the form token of a browser, which is the same on every page."""
    if client not in _tokens:
        _tokens[client] = await form_token(client)
    return _tokens[client]


async def make_queue(stand: Stand, **fields: str) -> tuple[httpx2.AsyncClient, str]:
    """Make a queue. Return the reviewer's browser and the address of the queue."""
    reviewer = await stand.signed_in("reviewer")
    form = {"form_token": await token_of(reviewer), **QUEUE, **fields}
    reply = await reviewer.post("/review/new", data=form, headers=BY_PAGE)
    assert reply.status_code == 303, reply.text
    return reviewer, reply.headers["location"]


async def next_item(client: httpx2.AsyncClient, queue: str, **fields: str) -> str:
    form = {"form_token": await token_of(client), **fields}
    reply = await client.post(f"{queue}/next", data=form, headers=BY_PAGE)
    assert reply.status_code == 303, reply.text
    return str(reply.headers["location"])


async def rate(client: httpx2.AsyncClient, item: str, answer: str, number: int = 1) -> httpx2.Response:
    form = {"form_token": await token_of(client), "answer": answer, "number": str(number)}
    return await client.post(item, data=form, headers=BY_PAGE)


def verdict_of_bob(call: Event) -> Feedback:
    """Return the verdict of another rater about a session of the queue `help`."""
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
    facts = [Fact(event, 0, at) for at, event in enumerate(bus.events)]
    for part in (facts[::-1], facts):
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


async def test_hostile_texts_are_shown_escaped(stand: Stand, bus: Bus) -> None:
    await bus.add(session_of(1, text=f"{HOSTILE}<button hx-get='/x' data-key='1'>"))
    reviewer, queue = await make_queue(stand, rubric=f"{HOSTILE} ok?")
    item = await next_item(reviewer, queue)
    for path in ("/review", queue, item):
        page = (await reviewer.get(path)).text
        assert "<script>alert" not in page
        assert "hx-get='/x'" not in page
        assert "\\u202eevil" in page


async def make_pairs(stand: Stand, bus: Bus, number: int) -> tuple[httpx2.AsyncClient, str]:
    await bus.add([session_of(at, answers=1 + 2 * (at % 2))[0] for at in range(number)])
    await make_queue(stand, question="pair")
    return await stand.signed_in("rater"), "/review/1"


def sides_of(page: str) -> tuple[str, str]:
    """Return the texts of A and B."""
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
        (event.withdrawn, event.about, event.label, event.level, event.choice is not None) for event in bus.verdicts()
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
        name for path in first if comes_again(name := str(uuid.UUID(hex=path.rpartition("/")[2])), "rater")
    }
    assert names
    assert names <= repeated_names
    assert len(again) == len(set(again))
    async with stand.console.database.transaction() as tx:
        rows = (await tx.execute(select(review_tables.verdicts).where(review_tables.verdicts.c.repeated))).all()
    assert len(rows) == len(again)
