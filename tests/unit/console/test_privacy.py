"""Tests that pages hide records from lower roles, foreign pages and other tenants, and delete expired sessions."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import get_args

import httpx2
import pytest
from sqlalchemy import func, select

from headrace_console.pages.page import Page
from headrace_console.read_model import queries, retention, tables
from headrace_console.read_model.batch import Batch, LogEvent
from headrace_console.read_model.rows import Names
from headrace_console.settings import Role, Scope
from headrace_operations.turn_account import turn_account_of
from headrace_runtime.clock import epoch_ms
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.database import Database
from headrace_schemas import Event, Feedback, Reward, TrainingMetrics
from headrace_schemas.values.ids import response_id, session_key
from tests.support.machine import blocked
from tests.support.presence import draw_seed
from tests.support.remembered import make_tables
from tests.support.turns import START, experience, letter, report, trajectory, turn, verdict
from tests.unit.console.support import (
    BY_PAGE,
    ORIGIN,
    Bus,
    Stand,
    bus,
    form_token,
    make_queue,
    next_item,
    session_of,
    token_of,
)
from tests.unit.console.test_counts import check_sessions, random_history

__all__ = ["bus"]
ROLES: tuple[Role, ...] = get_args(Role)
_PARAMETER = re.compile(r"\{([a-z_]+)(?::path)?\}")
_FOREIGN_PAGES: tuple[dict[str, str], ...] = (
    {"origin": "http://evil.example", "sec-fetch-site": "cross-site"},
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {},
    {"sec-fetch-site": "same-site"},
    {"origin": "http://127.0.0.1:9", "sec-fetch-site": "same-site"},
)


@pytest.fixture
async def stand_on_bus(tmp_path: Path, bus: Bus) -> AsyncIterator[Stand]:
    async with Stand(tmp_path) as opened:
        bus.stand = opened
        yield opened


def pages(stand_on_bus: Stand) -> list[Page]:
    """Return every page that needs a session, except the page for unknown addresses and the event stream."""
    return [page for page in stand_on_bus.console.pages if page.path not in ("/{path:path}", "/live")]


def address(page: Page, **values: str) -> str:
    return _PARAMETER.sub(lambda name: values.get(name[1], "x"), page.path)


async def request(client: httpx2.AsyncClient, page: Page, headers: dict[str, str], **values: str) -> httpx2.Response:
    token = await token_of(client)
    data = {"form_token": token} if page.method == "POST" else None
    return await client.request(page.method, address(page, **values), data=data, headers=headers)


async def test_every_route_refuses_every_lower_role(stand_on_bus: Stand) -> None:
    refused = 0
    for role in ROLES:
        client = await stand_on_bus.signed_in(role)
        token = re.search(r'name="form_token" value="([0-9a-f]{64})"', (await client.get("/review")).text)
        assert token is not None
        for page in pages(stand_on_bus):
            if ROLES.index(page.role) > ROLES.index(role):
                data = {"form_token": token[1]} if page.method == "POST" else None
                reply = await client.request(page.method, address(page), data=data, headers=BY_PAGE)
                assert reply.status_code == 403, (role, page.path)
                refused += 1
    assert refused >= len([page for page in pages(stand_on_bus) if page.role != "rater"])


async def test_every_route_refuses_another_host_and_every_change_of_a_foreign_page(stand_on_bus: Stand) -> None:
    client, attempts = await stand_on_bus.signed_in("operator"), 0
    data = {"form_token": await form_token(client), "reason": "x"}
    for page in pages(stand_on_bus):
        body = data if page.method == "POST" else None
        for host in ("evil.example", "evil.example:8040", "127.0.0.1.evil.example"):
            headers = {**BY_PAGE, "host": host}
            reply = await client.request(page.method, address(page), data=body, headers=headers)
            assert reply.status_code in (400, 403, 421), (page.path, host)
            attempts += 1
        if page.method == "POST":
            for foreign in _FOREIGN_PAGES:
                assert (await client.post(address(page), data=body, headers=foreign)).status_code == 403, page.path
                attempts += 1
            replayed = {**data, "form_token": "0" * 64}
            assert (await client.post(address(page), data=replayed, headers=BY_PAGE)).status_code == 403, page.path
            reply = await client.get(address(page), headers={"origin": ORIGIN})
            assert reply.status_code in (404, 405, 200), "a change is never a GET"
    assert attempts > 3 * len(pages(stand_on_bus))


async def test_foreign_and_unknown_ids_answer_alike_on_every_route(tmp_path: Path, bus: Bus) -> None:
    """Request records of another tenant, and records that do not exist, by every parameter of every route."""
    other_key, unknown = session_key("other", "private-1"), session_key("default", "nobody")
    async with Stand(tmp_path) as everywhere:
        bus.stand = everywhere
        events = session_of(1, tenant="other")
        await bus.add([*session_of(2), *events, letter(events[0], "collector")])
        reviewer, queue = await make_queue(everywhere, tenant="other")
        item = (await next_item(reviewer, queue)).rpartition("/")[2]
        turn = (await reviewer.get(f"/r/{events[0].event_id}")).headers["location"].partition("#t-")[2]
    foreign = {
        "key": other_key, "turn": turn, "turn_id": events[0].event_id, "queue": queue.rpartition("/")[2], "item": item,
    }  # fmt: skip
    absent = {"key": unknown, "turn": "999", "turn_id": response_id(unknown), "queue": "999", "item": "0" * 32}
    compared = 0
    async with Stand(tmp_path, tenants=("default",)) as stand_on_bus:
        bus.stand = stand_on_bus
        client = await stand_on_bus.signed_in("operator")
        for page in pages(stand_on_bus):
            names = _PARAMETER.findall(page.path)
            if not set(names) & foreign.keys():
                continue
            replies = [await request(client, page, BY_PAGE, **values) for values in (foreign, absent)]
            texts = {reply.text.replace(reply.url.path, "") for reply in replies}
            assert {reply.status_code for reply in replies} == {404}, page.path
            assert len(texts) == 1, page.path
            compared += 1
        for path in ("/find?q=", "/compare?left="):
            replies = [await client.get(path + values["turn_id"]) for values in (foreign, absent)]
            assert len({reply.status_code for reply in replies}) == 1
        listed = await client.get("/sessions")
        assert other_key not in listed.text
        assert (await client.get("/sessions?tenant=other")).status_code == 404
        assert (await client.get("/dead-letters")).status_code == 403, "letters are of all tenants"
    assert compared >= 10
    assert tables.LETTER_STATES


DAY = 20_000
RETENTION_DAYS = 30
BLOCK_S_MAX = 0.1


async def apply(database: Database, events: Sequence[Event], day: int) -> None:
    for start in range(0, len(events), 50):
        log_events = [LogEvent(event, 0, start + at) for at, event in enumerate(events[start : start + 50])]
        async with database.transaction() as tx:
            await Batch(tx, Names(), titles=True, day=day).apply(log_events)


async def delete_expired(database: Database, day: int) -> int:
    """Delete all rows that are expired on `day`, and return the number of transactions."""
    names, transactions, more = Names(), 0, True
    while more:
        async with database.transaction() as tx:
            more = await retention.delete_expired(tx, names, day=day, retention_days=RETENTION_DAYS)
        transactions += 1
    return transactions


async def rows_of(database: Database) -> dict[str, int]:
    async with database.transaction() as tx:
        return {
            table.name: await tx.scalar(select(func.count()).select_from(table)) or 0
            for table in tables.metadata.sorted_tables
        }


async def check_counts(database: Database, events: Sequence[Event]) -> None:
    """Compare the counts of each tenant with the turn account of `events`."""
    for tenant in ("default", "other"):
        tenant_events = [event for event in events if getattr(event, "tenant", tenant) == tenant]
        account = turn_account_of(tenant_events, complete=False)
        async with database.transaction() as tx:
            counts = await queries.counts(tx, Scope(frozenset({tenant})))
        assert (counts.captured, counts.trained) == (account.captured, account.trained)
        assert (counts.waiting, counts.dropped) == (account.waiting, account.dropped)


async def test_deletion_leaves_the_counts_of_the_other_sessions_and_a_replay_restores_them(database: Database) -> None:
    chance = random.Random(draw_seed())
    events = random_history(chance, 60)
    reports = [event for event in events if isinstance(event, TrainingMetrics)]
    keys = sorted({event.session_key for event in events if hasattr(event, "session_key")})
    expiring = set(chance.sample(keys, len(keys) // 2))
    old = [event for event in events if getattr(event, "session_key", None) in expiring]
    young = [event for event in events if event not in old and event not in reports]
    for part in (old, young):
        chance.shuffle(part)
    await apply(database, [*old, *reports], DAY)
    await apply(database, young, DAY + 1)
    await check_counts(database, events)
    await delete_expired(database, DAY + RETENTION_DAYS)
    await check_counts(database, events)
    await delete_expired(database, DAY + RETENTION_DAYS + 1)
    await check_counts(database, [*young, *reports])
    await check_sessions(database)
    async with database.transaction() as tx:
        stored = set((await tx.execute(select(tables.sessions.c.id))).scalars())
        stored_keys = set((await tx.execute(select(tables.sessions.c.session_key))).scalars())
        for table in (tables.turns, tables.trajectories, tables.experiences, tables.feedback):
            owners = set((await tx.execute(select(table.c.session))).scalars())
            assert owners <= stored, table.name
        rewarded = set((await tx.execute(select(tables.rewards.c.trajectory))).scalars())
        assert rewarded <= set((await tx.execute(select(tables.trajectories.c.id))).scalars())
    assert not stored_keys & expiring
    await apply(database, old, DAY + RETENTION_DAYS + 1)
    await check_sessions(database)
    await delete_expired(database, DAY + 3 * RETENTION_DAYS)
    left = {name: rows for name, rows in (await rows_of(database)).items() if rows}
    assert set(left) == {"names", "steps", "counts"}
    await check_counts(database, [])


async def test_large_session_is_deleted_in_portions(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_ROWS_AT_ONCE", 3)
    key = session_key("default", "large")
    ids = [response_id(key) for _ in range(20)]
    events: list[Event] = [turn(name, session_key=key) for name in ids]
    events += [trajectory("T", tuple(ids), session_key=key)]
    events += [experience("E", *ids).model_copy(update={"session_key": key})]
    events += [
        Reward(time=START, trajectory_id=f"T{at}", session_key=key, source="concise", value=0.5) for at in range(7)
    ]
    await apply(database, events, DAY)
    names, sizes = Names(), [20]
    while sizes[-1]:
        async with database.transaction() as tx:
            more = await retention.delete_expired(tx, names, day=DAY + 31, retention_days=RETENTION_DAYS)
        rows = await rows_of(database)
        sizes.append(rows["turns"])
        async with database.transaction() as tx:
            assert (await queries.counts(tx, Scope(None))).captured == rows["turns"]
        assert more or not rows["turns"]
    assert all(before - after <= 3 for before, after in itertools.pairwise(sizes))
    await delete_expired(database, DAY + 31)
    rows = await rows_of(database)
    assert not any(rows[name] for name in ("sessions", "trajectories", "experiences", "rewards"))


async def test_oldest_sessions_are_deleted_beyond_the_largest_number_of_turns(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "TURNS_MAX", 30)
    monkeypatch.setattr(retention, "_SESSIONS_AT_ONCE", 4)
    for day in range(10):
        keys = [session_key("default", f"{day}-{number}") for number in range(5)]
        await apply(database, [turn(response_id(key), session_key=key) for key in keys], DAY + day)
    await delete_expired(database, DAY + 10)
    async with database.transaction() as tx:
        days = (await tx.execute(select(tables.sessions.c.read_day))).scalars().all()
        assert await retention.captured_turns(tx) == len(days)
    assert 26 <= len(days) <= 30
    assert min(days) == DAY + 4


async def test_effects_without_a_cause_expire(database: Database) -> None:
    outcome = report(verdict("E", "a"))
    refused = turn("a")
    await apply(database, [outcome, letter(refused, "collector")], DAY)
    await delete_expired(database, DAY + RETENTION_DAYS)
    rows = await rows_of(database)
    assert (rows["experiences"], rows["refusals"]) == (1, 1)
    await delete_expired(database, DAY + RETENTION_DAYS + 1)
    rows = await rows_of(database)
    assert (rows["experiences"], rows["refusals"]) == (0, 0)


async def test_records_of_feedback_that_are_read_again_do_not_renew_a_session(database: Database) -> None:
    key = session_key("default", "old")
    thumb = Feedback(time=START, feedback_id="f", session_key=key, value=0.0)
    await apply(database, [turn(response_id(key), session_key=key), thumb, thumb], DAY)
    read_again = LogEvent(thumb, 0, 2)
    async with database.transaction() as tx:
        await Batch(tx, Names(), titles=True, day=DAY + 20).apply([read_again])
        assert await tx.scalar(select(tables.sessions.c.read_day)) == DAY
        await Batch(tx, Names(), titles=True, day=DAY + 20).apply([LogEvent(thumb, 0, 3), read_again])
        assert await tx.scalar(select(tables.sessions.c.read_day)) == DAY + 20
    assert (await rows_of(database))["feedback"] == 3


async def test_console_deletes_sessions_that_are_older_than_its_setting(data_dir: Path) -> None:
    stand = Stand(data_dir)
    await make_tables(stand.console.database, "headrace_console")
    today = epoch_ms(stand.clock.now()) // tables.DAY_MS
    for age in (0, 30, 31, 400):
        key = session_key("default", f"{age}")
        await apply(stand.console.database, [turn(response_id(key), session_key=key, session_id=f"{age}")], today - age)
    await stand.console.follower.delete_expired()
    async with stand.console.database.transaction() as tx:
        left = set((await tx.execute(select(tables.sessions.c.session_id))).scalars())
    assert left == {"0", "30"}
    await stand.console.close()


async def test_failed_deletion_does_not_stop_the_reading(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(data_dir)
    await make_tables(stand.console.database, "headrace_console")

    async def fail(*_arguments: object, **_options: object) -> bool:
        raise KeyError("a row")

    monkeypatch.setattr("headrace_console.read_model.follower.delete_expired", fail)
    await stand.console.follower.delete_expired()
    await stand.console.close()


async def test_events_of_many_turns_do_not_hold_the_event_loop(data_dir: Path) -> None:
    database = Database.open("console", Common.model_validate({"data_dir": data_dir}))
    await make_tables(database, "headrace_console")
    ids = [f"t{number}" for number in range(4096)]
    run = trajectory("T", tuple(ids), end_reason="ingest", left_out=dict.fromkeys(ids[:2000], "retried"))
    sample = experience("E", *ids)
    outcomes = [report(verdict("E", *ids, revision=number), save=number) for number in range(3)]
    async with blocked() as block:
        await apply(database, [run, sample, *outcomes], DAY)
        await delete_expired(database, DAY + RETENTION_DAYS + 1)
    assert (await rows_of(database))["turns"] == 0
    await database.close()
    assert block.busy_s < BLOCK_S_MAX
