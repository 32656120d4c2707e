"""Tests of means, marks and single turns in the read model, on both databases, and of packed ids."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from aiokafka import TopicPartition
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_console.read_model import follower, queries, session_list, status, tables
from headrace_console.read_model.batch import Batch, LogEvent
from headrace_console.read_model.packing import join_turn, pack_id, pack_key, split_turn, unpack_id, unpack_key
from headrace_console.read_model.reward_queries import rewards_by_source
from headrace_console.read_model.rows import ExperienceRow, Names
from headrace_console.read_model.session_list import Filter, session_page
from headrace_console.settings import Scope
from headrace_runtime.clock import SystemClock
from headrace_runtime.errors import Unavailable
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.database import Database
from headrace_schemas import Event, Feedback, Message, Reward, Turn
from headrace_schemas.values.ids import response_id, session_key
from tests.support.remembered import recorded
from tests.support.turns import START, turn, verdict

KEY = session_key("default", "s1")
TURN_IDS = (response_id(KEY), response_id(KEY))
DAY = 20_000


async def apply(database: Database, events: Sequence[Event], first_offset: int = 0) -> None:
    async with database.transaction() as tx:
        log_events = [LogEvent(event, 0, first_offset + at) for at, event in enumerate(events)]
        await Batch(tx, Names(), titles=True, day=DAY).apply(log_events)


def reward(run: int, value: float, **more: Any) -> Reward:
    fields = {"time": START, "trajectory_id": f"T{run}", "session_key": KEY, "source": "concise", **more}
    return Reward(value=value, **fields)


async def means(database: Database) -> dict[str, tuple[float | None, int]]:
    async with database.transaction() as tx:
        (tenant,) = (await queries.tenants(tx, Scope(None))).values()
        sources = await rewards_by_source(tx, tenant, 0)
    return {
        name: (source.mean and round(source.mean, 6), sum(source.buckets.values())) for name, source in sources.items()
    }


async def test_mean_of_a_source_counts_the_newest_revision_of_each_reward(database: Database) -> None:
    abstention = Reward(time=START, trajectory_id="T1", session_key=KEY, source="judge:help", outcome="abstained")
    await apply(database, [reward(1, 0.5), reward(2, -0.25), reward(3, 0.75), abstention])
    assert await means(database) == {"concise": (0.333333, 3), "judge:help": (None, 0)}
    later = {"time": START + timedelta(hours=5), "revision": 1}
    await apply(database, [reward(1, 0.53, revision=1), reward(2, 1.0, **later), reward(3, 0.25)])
    assert await means(database) == {"concise": (0.76, 3), "judge:help": (None, 0)}


def edit(at: int, **more: Any) -> Feedback:
    fields: dict[str, Any] = {"time": START, "session_key": KEY, "source": "console", "rater": "ann"}
    fields |= {"feedback_id": f"f{at}", "msg_ids": (TURN_IDS[0],), "edit": Message(role="assistant", content="Ada.")}
    fields |= more
    if fields.get("withdrawn"):
        fields |= {"edit": None, "kind": "edit"}
    return Feedback(**fields)


@pytest.mark.parametrize(
    ("feedback", "is_edited"),
    [
        ([edit(1)], True),
        ([edit(1), edit(2, withdrawn=True)], False),
        ([edit(1), edit(2), edit(3, withdrawn=True)], False),
        ([edit(1), edit(2, withdrawn=True), edit(3)], True),
        ([edit(1), edit(2, msg_ids=(TURN_IDS[1],)), edit(3, withdrawn=True)], True),
        ([edit(1), edit(2, rater="bob"), edit(3, withdrawn=True, rater="bob")], True),
        ([edit(1), edit(2, withdrawn=True, rater="bob")], True),
        ([edit(1), edit(2, withdrawn=True), edit(3, msg_ids=(TURN_IDS[1],), withdrawn=True)], False),
        ([edit(1), Feedback(time=START, feedback_id="f2", session_key=KEY, withdrawn=True)], True),
    ],
    ids=["edited", "undone", "both undone", "edited again", "other answer", "other rater", "foreign", "none", "value"],
)
@pytest.mark.parametrize("size", [1, 10], ids=["in single batches", "in one batch"])
async def test_session_is_marked_while_one_of_its_edits_is_valid(
    database: Database, feedback: list[Feedback], size: int, *, is_edited: bool
) -> None:
    for at in range(0, len(feedback), size):
        await apply(database, feedback[at : at + size], at)
    async with database.transaction() as tx:
        flags = (await tx.execute(select(tables.sessions.c.flags))).scalar_one()
    assert bool(flags & tables.FLAGS["edited"]) is is_edited


def turns(number: int) -> list[Turn]:
    return [
        turn(response_id(KEY), session_key=KEY, session_id="s1", time=START + timedelta(seconds=at))
        for at in range(number)
    ]


async def test_single_turn_is_found_without_reading_the_other_turns_of_its_session(database: Database) -> None:
    earlier = turns(400)
    for at in range(0, len(earlier), 100):
        await apply(database, earlier[at : at + 100])
    name = earlier[200].turn_id
    with recorded(database) as statements:
        await apply(database, turns(1))
        async with database.transaction() as tx:
            assert await queries.turn_of(tx, Scope(None), name) is not None
            assert await queries.turn_of_tail(tx, Scope(None), name[-32:]) is not None
    statements.found = {
        sql: values for sql, values in statements.found.items() if re.search(r"turns\.name (=|IN)", sql)
    }
    assert len(statements.found) == 3
    async with database.transaction() as tx:
        plans = [await rows_read(tx, sql, values) for sql, values in statements.found.items()]
    assert max(plans) <= 40, f"{plans}; ids of one millisecond have the same first bytes"


async def rows_read(tx: AsyncConnection, sql: str, values: Any) -> int:
    """Return the number of rows of `turns` that a statement reads, with those that a filter removes."""
    if tx.dialect.name == "postgresql":
        await tx.exec_driver_sql("SET LOCAL enable_seqscan = off")  # as it would with many sessions
        plan = (await tx.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}", values)).scalar_one()
        nodes = [(json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"]]
        rows = 0
        while nodes:
            node = nodes.pop()
            nodes += node.get("Plans", ())
            if node.get("Relation Name") == "turns":
                removed = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
                rows += (node["Actual Rows"] + removed) * node["Actual Loops"]
        return rows
    plan = [row.detail for row in await tx.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", values)]
    steps = [step for step in plan if "turns" in step]
    return 1 if all("(session=? AND <expr>=?)" in step for step in steps) else 400


async def list_there_and_back(database: Database, selection: Filter) -> tuple[list[list[str]], list[list[str]]]:
    """Return the ids of the sessions of each page, from the newest page on to the last one and back."""
    pages: list[list[str]] = []
    back: list[list[str]] = []
    async with database.transaction() as tx:
        (tenant,) = (await queries.tenants(tx, Scope(None))).values()
        page = await session_page(tx, tenant, selection)
        assert page.before is None
        while True:
            pages.append([row["session_id"] for row in page.rows])
            if page.after is None or len(pages) > 20:
                break
            page = await session_page(tx, tenant, replace(selection, after=page.after))
        while page.before is not None and len(back) < 20:
            page = await session_page(tx, tenant, replace(selection, before=page.before))
            back.append([row["session_id"] for row in page.rows])
            following = await session_page(tx, tenant, replace(selection, after=page.after))
            assert following.before is not None
    return pages, back


def sessions_at(number: int) -> list[Event]:
    """Return one turn of each of `number` sessions, of which three have begun at the same time."""
    events: list[Event] = []
    for at in range(number):
        key, time = session_key("default", f"n{at}"), START + timedelta(seconds=at // 3)
        purpose = "eval" if at % 50 else "train"
        events.append(turn(response_id(key), session_key=key, session_id=f"n{at}", time=time, purpose=purpose))
    return events


async def test_previous_pages_of_the_list_are_the_pages_that_were_left(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_list, "PAGE_ROWS", 20)
    events = sessions_at(70)
    await apply(database, events)
    pages, back = await list_there_and_back(database, Filter())
    assert [name for page in pages for name in page] == [f"n{at}" for at in range(69, -1, -1)]
    assert back == pages[-2::-1]


async def test_previous_page_of_a_search_continues_from_where_it_stopped(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_list, "SEARCHED_MAX", 30)
    await apply(database, sessions_at(150))
    pages, back = await list_there_and_back(database, Filter(hides_evaluation=True))
    assert [page for page in pages if page] == [["n100"], ["n50"], ["n0"]]
    assert [page for page in back if page] == [["n0"], ["n50"], ["n100"]]
    assert len(back) >= 4, "the last search goes to the newest session"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(response_id(session_key("default", "s")), id="a response"),
        "6f1d3c1e-9c0e-5d0a-8a55-6865616472ab",
        "a",
        "chatcmpl-abc",
        "x" * 15,
        "x" * 16,
        "x" * 26,
        "x" * 512,
        "6F1D3C1E-9C0E-5D0A-8A55-6865616472AB",
        "é\u202e",
    ],
)
def test_packed_ids_are_unpacked_unchanged(text: str) -> None:
    assert unpack_id(pack_id(text)) == text
    key, stored = split_turn(pack_id(text))
    assert (key is None) == (len(stored) != 16)
    assert join_turn(key or "", stored) == pack_id(text)


def test_packed_session_key_is_unpacked_unchanged_and_equals_no_other_text() -> None:
    key = session_key("default", "s")
    assert unpack_key(pack_key(key)) == key
    assert len(pack_key(key)) == 10
    assert len({pack_key(text) for text in (key, key.upper(), "", "a", key + "a")}) == 5


def test_history_of_outcomes_is_bounded_and_keeps_what_statuses_need() -> None:
    names, row = Names(), ExperienceRow(1, b"x", revision=999)
    for revision in range(1000):
        item = verdict("E", "a", revision=revision, dropped="superseded" if revision else None)
        status.add_outcome(row, (1, revision), item, names)
    assert len(row.history or "") < 20_000
    assert status.outcomes_of(row, 1, names).status("a", 999, None, refused=False) == ("trained", "")


class StuckConsumer:
    """Connection to a bus without records that never answers a read of the topic `stuck`."""

    def __init__(self) -> None:
        self.stopped = False

    async def beginning_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        if partitions[0].topic == "stuck":
            await asyncio.Event().wait()
        return dict.fromkeys(partitions, 0)

    async def end_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, 0)

    def assign(self, _partitions: Sequence[TopicPartition]) -> None: ...

    def pause(self, _partition: TopicPartition) -> None: ...

    async def start(self) -> None: ...

    async def stop(self) -> None:
        self.stopped = True


async def test_a_slow_read_of_a_record_delays_no_other_read_and_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumers: list[StuckConsumer] = []

    def connect(*_: object, **__: object) -> StuckConsumer:
        consumers.append(StuckConsumer())
        return consumers[-1]

    monkeypatch.setattr(follower, "consumer", connect)
    monkeypatch.setattr(follower, "_READ_TIMEOUT_S", 0.5, raising=False)
    reader = follower.RecordReader(BusSettings(), BlobStore(tmp_path.as_uri()), SystemClock())
    slow = asyncio.create_task(reader.read("stuck", [(0, 1)]))
    await asyncio.sleep(0)
    for _ in range(20):
        assert await asyncio.wait_for(reader.read("turns", [(0, 1)]), 0.4) == {}
    assert not slow.done()
    with pytest.raises(Unavailable, match="bus"):
        await asyncio.wait_for(slow, 5.0)
    await reader.close()
    assert len(consumers) == 2, "a connection is used again"
    assert all(consumer.stopped for consumer in consumers)
