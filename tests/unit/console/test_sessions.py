"""Tests of the pages of sessions, turns and rewards, with a read model that is filled from events."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest

from headrace_console.read_model import queries, session_list
from headrace_console.read_model.batch import Batch, LogEvent
from headrace_console.read_model.rows import Names
from headrace_console.read_model.session_list import Filter, session_page
from headrace_console.settings import Scope
from headrace_schemas import Event, Feedback, Message, Reward
from headrace_schemas.values.ids import response_id, session_key
from tests.support.remembered import recorded, scans
from tests.support.turns import START, VERSION, experience, letter, report, trajectory, turn, verdict
from tests.unit.console.support import Stand

KEY = session_key("default", "s1")
TURN_ID = response_id(KEY)
OTHER_KEY = session_key("other", "s1")
DAY = 20_000
HOSTILE = "<script>alert(1)</script>\u202eevil"


async def apply(stand: Stand, events: Sequence[Event], *, titles: bool = True) -> None:
    async with stand.console.database.transaction() as tx:
        log_events = [LogEvent(event, 0, offset) for offset, event in enumerate(events)]
        await Batch(tx, Names(), titles=titles, day=DAY).apply(log_events)


def session_events() -> list[Event]:
    more: dict[str, Any] = {"session_key": KEY, "session_id": "s1", "task_id": "invoices"}
    question = Message(role="user", content=f"Who sent  it?\n{HOSTILE}")
    run = trajectory("T", (TURN_ID,), **more)
    trained = experience("E", TURN_ID, reward=0.5).model_copy(update={"session_key": KEY})
    rewards = [
        Reward(time=START, trajectory_id="T", session_key=KEY, source="concise", value=0.8),
        Reward(time=START, trajectory_id="T", session_key=KEY, source="judge:help", outcome="abstained"),
        Reward(time=START, trajectory_id="T", session_key=KEY, source="concise", value=0.4, revision=1),
    ]
    thumb = Feedback(time=START, feedback_id="f", session_key=KEY, msg_ids=(TURN_ID,), value=0.0)
    outcome = report(verdict("E", TURN_ID)).model_copy(update={"version": VERSION})
    return [turn(TURN_ID, messages=(question,), **more), run, trained, *rewards, thumb, outcome]


def foreign_events() -> list[Event]:
    more = {"tenant": "other", "session_key": OTHER_KEY, "session_id": "s1"}
    return [turn(response_id(OTHER_KEY), **more)]


async def test_list_shows_a_session_with_its_numbers(stand: Stand) -> None:
    await apply(stand, session_events())
    client = await stand.signed_in()
    page = (await client.get("/sessions")).text
    assert f'href="/s/{KEY}"' in page
    assert "Who sent it? &lt;script&gt;" in page
    assert "\\u202eevil" in page
    for text in ("0.50", "down", "1 trained", "reward source: abstained"):
        assert f">{text}<" in page, text
    assert "<script>alert" not in page


async def test_session_states_whether_an_answer_was_edited(stand: Stand) -> None:
    await apply(stand, session_events())
    page = (await (await stand.signed_in()).get(f"/s/{KEY}")).text
    assert "Nobody has stated what an answer should have been. A reviewer can, with an edit." in page
    page = (await (await stand.signed_in("reviewer")).get(f"/s/{KEY}")).text
    assert "To state it, follow “Score or edit this turn” below." in page


async def test_loop_states_the_last_call_of_a_user(stand: Stand) -> None:
    evaluated = session_key("default", "e")
    later = {"session_key": evaluated, "purpose": "eval", "time": START + timedelta(hours=1)}
    client = await stand.signed_in()
    await apply(stand, [turn(response_id(evaluated), **later)])
    assert "The last 500 calls were evaluations." in (await client.get("/")).text
    await apply(stand, session_events())
    page = (await client.get("/")).text
    assert 'Last call of a user: <time datetime="2026-01-01T00:00' in page


async def test_loop_shows_the_account_of_the_tenants_that_the_user_may_see(tmp_path: Path) -> None:
    stand = Stand(tmp_path, tenants=("default",))
    client = await stand.signed_in()
    assert "captured =" not in (await client.get("/")).text
    dropped = verdict("E", TURN_ID, dropped="stale")
    await apply(stand, [*session_events()[:3], *foreign_events(), report(dropped)])
    for headers in ({}, {"hx-request": "true"}):
        page = (await client.get("/", headers=headers)).text
        assert "1 turn captured = 0 trained + 0 waiting + 1 dropped (stale 1)." in page
    await stand.console.close()


@pytest.mark.parametrize(
    ("query", "is_listed"),
    [
        ("thumb=down", True),
        ("thumb=up", False),
        ("status=trained", True),
        ("status=dropped", False),
        (f"version={VERSION}", True),
        ("version=0123456789ab", True),
        ("version=m@012345678", False),
        ("version=other@0123456789ab", False),
        ("evaluation=shown", True),
        ("version=m@000000000000", False),
        ("model=m&task=invoices", True),
        ("task=other", False),
        ("reward_max=0.5", True),
        ("reward_max=0.4", False),
        ("outcome=abstained&thumb=down", True),
        ("outcome=failed", False),
        ("edited=yes", False),
        ("arm=candidate", False),
        ("since=2026-01-01T00:00", True),
        ("since=2026-01-01T00:01", False),
        ("since=01 Jan 2026 00:00:00 UTC", True),
        ("since=1 Jan 2026 00:01", False),
        ("since=2026-01-01 00:00:01 UTC", False),
        ("tenant=default&thumb=", True),
    ],
)
async def test_list_applies_filter(stand: Stand, query: str, *, is_listed: bool) -> None:
    await apply(stand, session_events())
    client = await stand.signed_in()
    reply = await client.get(f"/sessions?{query}")
    assert reply.status_code == 200
    assert (f'href="/s/{KEY}"' in reply.text) is is_listed
    assert is_listed or "No session matches" in reply.text


@pytest.mark.parametrize(
    "query",
    [
        "thumb=sideways",
        "since=now",
        "reward_max=low",
        "reward_max=nan",
        "reward_max=1e999",
        "after=x",
        "after=1",
        "before=1",
        "order=reward",
        "status=lost",
        "evaluation=no",
        "edited=no",
    ],
)
async def test_list_refuses_unknown_value_by_name(stand: Stand, query: str) -> None:
    client = await stand.signed_in()
    reply = await client.get(f"/sessions?{query}")
    assert reply.status_code == 400
    assert query.partition("=")[2] in reply.text or "order" in reply.text


async def test_list_refuses_two_positions(stand: Stand) -> None:
    reply = await (await stand.signed_in()).get("/sessions?after=1.1&before=2.2")
    assert reply.status_code == 400
    assert "before = &#39;2.2&#39;: must not be combined with after" in reply.text


async def test_list_keeps_what_was_typed_beside_a_refused_filter(stand: Stand) -> None:
    reply = await (await stand.signed_in()).get("/sessions?task=invoices&reward_max=low&thumb=down")
    assert reply.status_code == 400
    assert "reward at most = &#39;low&#39;: must be a finite number" in reply.text
    for kept in ('value="invoices"', 'value="low"', '<option value="down" selected>'):
        assert kept in reply.text, kept


async def test_list_shows_when_a_session_began_and_when_it_was_called_last(stand: Stand) -> None:
    later = turn(response_id(KEY), session_key=KEY, session_id="s1", time=START + timedelta(hours=30))
    await apply(stand, [*session_events(), later])
    page = (await (await stand.signed_in()).get("/sessions")).text
    times = re.findall(r"<time [^>]*>([^<]*)</time>", page)
    assert times == ["01 Jan 2026 00:00", "02 Jan 2026 06:00"]
    assert '<th scope="col">last call (UTC)</th>' in page
    assert "task invoices" in page, "so that the filter can be used"


async def test_pages_of_the_list_follow_each_other_without_gap_or_repetition(stand: Stand) -> None:
    keys = [session_key("default", f"n{number}") for number in range(250)]
    await apply(
        stand,
        [
            turn(response_id(key), session_key=key, session_id=f"n{at}", time=START + timedelta(seconds=at // 3))
            for at, key in enumerate(keys)
        ],
    )
    client = await stand.signed_in()
    addresses, pages = ["/sessions"], list[list[str]]()
    for link in ("Next", "Next", "Previous", "Previous"):
        page = (await client.get(addresses[-1])).text
        pages.append(re.findall(r'href="/s/([a-z2-7]{16})"', page))
        address = re.search(rf'href="([^"]*)">{link}<', page)
        assert address is not None, link
        addresses.append("/sessions" + address[1].replace("&amp;", "&"))
    last = (await client.get(addresses[-1])).text
    assert re.findall(r'href="/s/([a-z2-7]{16})"', last) == pages[0]
    assert ">Previous<" not in last
    assert pages[3] == pages[1]
    listed = [key for page in pages[:3] for key in page]
    assert listed == keys[::-1]


async def test_search_without_an_index_stops_and_continues(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_list, "SEARCHED_MAX", 50)
    await apply(stand, [*session_events(), *_sessions(120)])
    async with stand.console.database.transaction() as tx:
        tenant = (await queries.tenants(tx, Scope(None)))["default"]
        rows, after, pages = 0, None, 0
        while pages < 5:
            page = await session_page(tx, tenant, Filter(outcome="abstained", after=after))
            rows, after, pages = rows + len(page.rows), page.after, pages + 1
            if after is None:
                break
    assert (rows, pages) == (1, 3)


def _sessions(number: int) -> list[Event]:
    events: list[Event] = []
    for at in range(number):
        key = session_key("default", f"many{at}")
        more = {"session_key": key, "session_id": f"many{at}", "time": START + timedelta(minutes=at + 1)}
        ids = [response_id(key) for _ in range(2)]
        events += [turn(name, **more) for name in ids]
        events += [trajectory(f"many{at}", tuple(ids), session_key=key)]
        events += [experience(f"E{at}", *ids, of=f"many{at}").model_copy(update={"session_key": key})]
        events += [Reward(time=START, trajectory_id=f"many{at}", session_key=key, source="concise", value=at / 100)]
    return events


async def test_session_page_shows_turns_outcomes_and_rewards(stand: Stand) -> None:
    await apply(stand, session_events())
    client = await stand.signed_in()
    page = (await client.get(f"/s/{KEY}")).text
    for text in (
        TURN_ID,
        "trained",
        '(step 0 of lineage main), first in <a href="/models/m/0123456789ab">m@0123456789ab</a>',
        "concise",
        "0.400",
        "abstained",
    ):
        assert text in page, text
    assert "0.800" not in page, "a later revision replaces the value"
    assert "the bus does not answer" in page


async def test_response_id_leads_to_its_turn(stand: Stand) -> None:
    await apply(stand, session_events())
    client = await stand.signed_in()
    for address in (f"/r/{TURN_ID}", f"/find?q={TURN_ID}", f"/find?q={TURN_ID[-32:]}"):
        reply = await client.get(address)
        assert reply.status_code == 303
        target = reply.headers["location"]
        assert target.startswith(f"/s/{KEY}#t-")
        assert f'id="{target.partition("#")[2]}"' in (await client.get(target)).text


async def test_response_id_of_a_long_session_leads_to_the_page_that_shows_it(stand: Stand) -> None:
    ids = [response_id(KEY) for _ in range(450)]
    await apply(
        stand,
        [
            turn(name, session_key=KEY, session_id="s1", time=START + timedelta(seconds=at))
            for at, name in enumerate(ids)
        ],
    )
    client = await stand.signed_in()
    for name in (ids[0], ids[200], ids[-1]):
        target = (await client.get(f"/r/{name}")).headers["location"]
        page = (await client.get(target)).text
        assert f'id="{target.partition("#")[2]}"' in page
        assert name in page


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("s1", f"/s/{KEY}"),
        (KEY, f"/s/{KEY}"),
        (VERSION, "/models/m/0123456789ab"),
        ("0123456789ab", "/models/m/0123456789ab"),
        ("invoices", "/sessions?task=invoices"),
        ("", "/sessions"),
    ],
)
async def test_find_leads_to_what_the_text_names(stand: Stand, text: str, target: str) -> None:
    await apply(stand, session_events())
    client = await stand.signed_in()
    reply = await client.get("/find", params={"q": text})
    assert reply.headers["location"].startswith(target)


async def test_find_states_what_was_searched_without_a_match(stand: Stand) -> None:
    await apply(stand, session_events())
    client = await stand.signed_in()
    for text in ("unheard", "ffffffffffff", "m@ffffffffffff"):
        reply = await client.get("/find", params={"q": text})
        assert reply.status_code == 404
        assert "not found among response ids, sessions, models, versions (12 digits or more) and tasks" in reply.text


async def test_list_hides_evaluation_sessions_unless_they_are_asked_for(stand: Stand) -> None:
    await apply(stand, [turn(TURN_ID, session_key=KEY, session_id="s1", purpose="eval")])
    client = await stand.signed_in("reviewer")
    page = (await client.get("/sessions")).text
    assert f'href="/s/{KEY}"' not in page
    assert "apart from evaluation sessions" in page
    address = re.search(r'href="(\?[^"]*evaluation=shown)">Show them', page)
    assert address is not None
    shown = (await client.get(f"/sessions{address[1]}")).text
    assert f'href="/s/{KEY}"' in shown
    assert "Show them" not in shown
    assert 'href="/review/new"' in shown, "a queue has no such filter"


async def test_foreign_and_unknown_ids_answer_alike(stand: Stand) -> None:
    await apply(stand, [*session_events(), *foreign_events()])
    scope = Scope(frozenset({"default"}))
    async with stand.console.database.transaction() as tx:
        assert await queries.session_of(tx, scope, OTHER_KEY) is None
        assert await queries.turn_of(tx, scope, foreign_events()[0].event_id) is None
        assert list(await queries.tenants(tx, scope)) == ["default"]
        assert (await queries.counts(tx, scope)).captured == 1
        assert (await queries.counts(tx, Scope(None))).captured == 2
        assert await queries.session_of(tx, Scope(frozenset()), KEY) is None


async def test_titles_are_not_stored_if_the_setting_forbids_it(stand: Stand) -> None:
    await apply(stand, session_events(), titles=False)
    client = await stand.signed_in()
    page = (await client.get("/sessions")).text
    assert "Who sent" not in page
    assert ">s1</a>" in page


async def test_empty_pages_say_what_fills_them(stand: Stand) -> None:
    client = await stand.signed_in()
    assert "No session yet" in (await client.get("/sessions")).text
    assert "No reward" in (await client.get("/rewards")).text


@pytest.mark.parametrize(
    "address",
    ["/sessions", f"/s/{KEY}", f"/r/{TURN_ID}", "/rewards", "/find?q=x"],
    ids=["sessions", "session", "response", "rewards", "find"],  # workers must agree on them; an id has the time in it
)
async def test_pages_need_a_session_and_the_role_viewer(stand: Stand, address: str) -> None:
    await apply(stand, session_events())
    client: httpx2.AsyncClient = stand.client()
    assert (await client.get(address)).headers["location"] == "/login"
    rater = await stand.signed_in("rater")
    assert (await rater.get(address)).status_code == 403


async def test_queries_never_scan_whole_tables(stand: Stand) -> None:
    await apply(stand, [*_sessions(50), *session_events(), letter(session_events()[0], "collector")])
    client = await stand.signed_in()
    with recorded(stand.console.database) as statements:
        for query in (
            "",
            "edited=yes",
            "thumb=down",
            "status=trained",
            f"version={VERSION}",
            "task=invoices",
            "outcome=failed",
        ):
            assert (await client.get(f"/sessions?{query}")).status_code == 200
        letters = "/dead-letters/group?service=collector&topic=turns&reason=invalid_event"
        for address in (f"/s/{KEY}", f"/r/{TURN_ID}", "/rewards", "/dead-letters", letters, "/"):
            assert (await client.get(address)).status_code in (200, 303)
        await apply(stand, [*_sessions(3), *session_events(), letter(session_events()[0], "trainer")])
    assert len(statements.found) > 20
    allowed = frozenset({"counts", "hours", "names", "positions"})  # a few rows each, or read by their primary key
    async with stand.console.database.transaction() as tx:
        problems = await scans(tx, statements, partial=frozenset(), rows_max=1_000)
    harmless = re.compile(rf"SCAN ([0-9]+ CONSTANT ROWS|({'|'.join(allowed)})\b)")
    assert [text for text in problems if not harmless.match(text)] == []
