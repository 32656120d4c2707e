"""Tests of the error policy of stream services: at-least-once delivery, effects exactly once, and no ignored error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from sqlalchemy import Column, Integer, MetaData, Table, Text, insert, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.errors import DiskFull, InvalidEvent, Unavailable
from headrace_runtime.kafka.wire import Outgoing
from headrace_runtime.settings.sections import RefusalBounds
from headrace_runtime.storage.tables import StreamTables
from headrace_runtime.stream import delivery
from headrace_runtime.stream.pausing import TenantLimits
from headrace_runtime.stream.processor import Handling, Unfinished, read_positions, run_until_finished
from headrace_schemas import DeadLetter, Event, Feedback, Reward, SessionEnd
from headrace_schemas.values.ids import session_key
from tests.support.streams import Bench, Service, bench
from tests.support.turns import START

metadata = MetaData()
tables = StreamTables(metadata)
effects = Table("effects", metadata, Column("n", Integer, primary_key=True), Column("feedback_id", Text))
KEY = session_key("default", "s")


def feedback(name: str, value: float = 1.0) -> Feedback:
    return Feedback(time=START, feedback_id=name, session_key=KEY, value=value)


def sample(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"headrace_{name}", labels) or 0.0


class Handlers:
    """Handlers that write one row and one event for each feedback. `on` maps a feedback id to one error for each
    attempt."""

    def __init__(self) -> None:
        self.on: dict[str, list[Exception]] = {}
        self.seen_ends: list[dict[str, dict[int, int]]] = []
        self.positions: list[int] = []
        """Results of `read_positions` for each settling step."""
        self.overtaken: list[int] = []
        """Offsets of records that were handled when `read_positions` was already past them."""
        self.after_batch_fails: Exception | None = None

    async def feedback(self, event: Feedback, handling: Handling) -> Sequence[Event]:
        if (await read_positions(handling.tx, tables, "feedback")).get(0, 0) > handling.received.record.offset:
            self.overtaken.append(handling.received.record.offset)
        await handling.tx.execute(insert(effects).values(feedback_id=event.feedback_id))
        if self.on.get(event.feedback_id):
            raise self.on[event.feedback_id].pop(0)
        return [Reward(time=handling.now, trajectory_id=event.feedback_id, session_key=KEY, source="f", value=1.0)]

    async def end(self, _event: SessionEnd, handling: Handling) -> Sequence[Event]:
        self.seen_ends.append({topic: dict(offsets) for topic, offsets in handling.ends.items()})
        return []

    async def after_batch(self, tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
        self.positions += (await read_positions(tx, tables, "feedback")).values()
        if self.after_batch_fails:
            raise self.after_batch_fails
        return []


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


@pytest.fixture
async def stream(handlers: Handlers, database_url: str, data_dir: Path) -> AsyncIterator[Bench]:
    service = Service(
        tables=tables,
        handlers={"feedback": handlers.feedback, "session-ends": handlers.end},
        ends_of={"session-ends": ("turns", "feedback")},
        after_batch=handlers.after_batch,
    )
    async with bench(service, database_url, data_dir) as service_bench:
        yield service_bench


async def handled_ids(stream: Bench) -> list[str]:
    async with stream.processor.database.transaction() as tx:
        return list((await tx.execute(select(effects.c.feedback_id).order_by(effects.c.n))).scalars())


def published(stream: Bench) -> list[str]:
    return [reward.trajectory_id for reward in stream.sent(Reward)]


async def test_a_batch_has_its_effects_events_and_position(stream: Bench, handlers: Handlers) -> None:
    await stream.deliver(feedback("a"), feedback("b"))
    await stream.deliver(feedback("c"))
    assert await handled_ids(stream) == published(stream) == ["a", "b", "c"]
    assert handlers.positions == [2, 3], "the step after a batch sees the position after it"


async def test_recovery_waits_for_its_turn(stream: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers may commit while the host is still starting."""
    send, sending, go = stream.producer.send_raw, asyncio.Event(), asyncio.Event()

    async def slowly(records: Iterable[Outgoing]) -> None:
        sending.set()
        await go.wait()
        await send(records)

    monkeypatch.setattr(stream.producer, "send_raw", slowly)
    async with asyncio.TaskGroup() as group:
        group.create_task(stream.deliver(feedback("a")))
        await sending.wait()
        group.create_task(stream.processor.recover())
        for _ in range(20):
            await asyncio.sleep(0)
        go.set()
    assert published(stream) == ["a"]


async def test_an_event_has_one_effect_however_often_it_comes(stream: Bench) -> None:
    record, again = stream.produce(feedback("a"), feedback("a"))
    await stream.deliver(record, again)
    await stream.deliver(record, feedback("b"))
    assert await handled_ids(stream) == published(stream) == ["a", "b"]


@pytest.mark.parametrize(("value", "reason"), [(b"{", "invalid_json"), (b"{}", "invalid_event"), (None, "empty_value")])
async def test_a_record_that_cannot_be_read_is_dead_lettered_whole(
    stream: Bench, value: bytes | None, reason: str
) -> None:
    poison = stream.append("feedback", value)
    await stream.deliver(poison, feedback("a"))
    (letter,) = stream.sent(DeadLetter)
    assert (letter.reason, letter.value, letter.source_offset) == (reason, value or b"", 0)
    assert await handled_ids(stream) == ["a"]


async def test_one_bad_record_costs_the_others_nothing(stream: Bench, handlers: Handlers) -> None:
    handlers.on["b"] = [RuntimeError("broken")] * 9
    await stream.deliver(feedback("a"), feedback("b"), feedback("c"))
    assert await handled_ids(stream) == published(stream) == ["a", "c"]
    (letter,) = stream.sent(DeadLetter)
    assert (letter.reason, letter.attempts, letter.source_offset) == ("handler_error", 3, 1)
    assert Feedback.from_json(letter.value).feedback_id == "b"


async def test_a_handler_can_refuse_an_event_with_a_reason(stream: Bench, handlers: Handlers) -> None:
    handlers.on["a"] = [InvalidEvent("unknown_target", "no such turn")] * 2
    await stream.deliver(feedback("a"), feedback("b"))
    assert [letter.reason for letter in stream.sent(DeadLetter)] == ["unknown_target"]
    assert await handled_ids(stream) == ["b"]


async def test_the_position_never_promises_what_is_still_to_be_done(stream: Bench, handlers: Handlers) -> None:
    handlers.on["b"] = [RuntimeError("split the batch")]
    batch = [*stream.produce(feedback("a")), stream.append("feedback", b"{"), *stream.produce(feedback("b"))]
    await stream.deliver(*batch)
    assert handlers.overtaken == []
    assert handlers.positions[-3:] == [1, 2, 3]


async def test_what_is_away_is_waited_for(stream: Bench, handlers: Handlers) -> None:
    handlers.on["a"] = [Unavailable("away")] * 3
    await stream.deliver(feedback("a"))
    assert await handled_ids(stream) == ["a"]
    assert stream.sent(DeadLetter) == []
    assert stream.clock.now() > START


async def test_a_full_disk_is_waited_for_however_long_it_takes(stream: Bench, handlers: Handlers) -> None:
    """The number of failures would end the process if another dependency were unavailable."""
    handlers.on["a"] = [DiskFull("disk: no space left on /data")] * 99
    await stream.deliver(feedback("a"))
    assert await handled_ids(stream) == ["a"]
    assert stream.sent(DeadLetter) == []


async def test_what_stays_away_stops_the_process_and_loses_nothing(stream: Bench, handlers: Handlers) -> None:
    handlers.on["b"] = [Unavailable("away")] * 99
    batch = [stream.produce(feedback(name))[0] for name in "ab"]
    with pytest.raises(Unavailable):
        await stream.deliver(*batch)
    assert await handled_ids(stream) == []
    handlers.on.clear()
    await stream.deliver(*batch)
    assert await handled_ids(stream) == published(stream) == ["a", "b"]


async def test_a_bus_that_cannot_tell_its_ends_dead_letters_nobody(stream: Bench, handlers: Handlers) -> None:
    failures = [Unavailable("away")] * 2

    async def ends(topic: str) -> Mapping[int, int]:
        if failures:
            raise failures.pop()
        return await stream.ends(topic)

    stream.processor.ends = ends
    stream.produce(feedback("a"), feedback("b"))
    await stream.deliver(SessionEnd(time=START, end_id="e", session_key=KEY))
    assert stream.sent(DeadLetter) == []
    assert handlers.seen_ends == [{"turns": dict.fromkeys(range(4), 0), "feedback": {0: 2, 1: 0, 2: 0, 3: 0}}]


async def test_events_that_the_bus_refuses_are_sent_later_and_handled_once(stream: Bench) -> None:
    stream.producer.fail(3)
    await stream.deliver(feedback("a"))
    assert await handled_ids(stream) == published(stream) == ["a"]


async def test_a_crash_before_sending_is_made_good_at_the_next_start(stream: Bench) -> None:
    stream.producer.fail(999)
    with pytest.raises(Unavailable):
        await stream.deliver(feedback("a"), feedback("b"))
    stream.producer.fail(0)
    assert published(stream) == []
    stream.processor.outbox._unsent.clear()  # what a process keeps in memory dies with it
    await stream.processor.recover()
    assert published(stream) == ["a", "b"]
    await stream.deliver(feedback("c"))
    await stream.processor.recover()
    assert published(stream) == ["a", "b", "c"], "rows that the bus has acknowledged are gone"


async def test_a_broken_step_after_a_batch_neither_stops_the_process_nor_blames_a_record(
    stream: Bench, handlers: Handlers
) -> None:
    handlers.after_batch_fails = ValueError("a bug")
    before = sample("steps_failed_total", service="test")
    await stream.deliver(feedback("a"))
    assert (await handled_ids(stream), stream.sent(DeadLetter)) == (["a"], [])
    assert sample("steps_failed_total", service="test") == before + 1


async def test_timed_work_publishes_what_it_returns(stream: Bench) -> None:
    async def work(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
        await tx.execute(insert(effects).values(feedback_id="timed"))
        return [Reward(time=now, trajectory_id="timed", session_key=KEY, source="f", value=1.0)]

    await stream.step(work)
    assert await handled_ids(stream) == published(stream) == ["timed"]


async def test_a_new_database_starts_at_the_position_of_its_group(stream: Bench) -> None:
    await stream.deliver(feedback("a"))
    await stream.processor.recover({("feedback", 0): 7, ("turns", 2): 5})
    async with stream.processor.database.transaction() as tx:
        assert await read_positions(tx, tables, "turns") == {2: 5}
        assert await read_positions(tx, tables, "feedback") == {0: 1}, (
            "what the effects reach is known better than that"
        )


async def test_old_ids_are_forgotten(stream: Bench) -> None:
    await stream.deliver(feedback("a"))
    stream.clock.advance(timedelta(days=9).total_seconds())
    await stream.deliver(feedback("b"))
    await stream.processor.prune()
    assert await stream.count("seen") == 1


async def test_events_continue_the_trace_that_caused_them(stream: Bench) -> None:
    parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    record = stream.produce(feedback("a"))[0]
    headers = (*record.headers, ("traceparent", parent.encode()))
    await stream.deliver(type(record)("feedback", 0, 0, record.key, record.value, headers))
    (sent,) = stream.producer.records
    carried = dict(sent.headers)["traceparent"].decode()
    assert carried.split("-")[1] == "a" * 32
    assert carried != parent


async def test_ids_that_may_come_again_outlive_pruning(stream: Bench) -> None:
    again = feedback("a")
    await stream.deliver(again)
    stream.clock.advance(timedelta(days=7).total_seconds())
    await stream.processor.prune()
    rows = await stream.count("effects")
    await stream.deliver(again)
    assert await stream.count("seen") == 1
    assert await stream.count("effects") == rows


async def test_a_refused_record_has_one_dead_letter_however_often_it_is_delivered(stream: Bench) -> None:
    poison = stream.append("feedback", b"{")
    for _ in range(3):
        await stream.deliver(poison)
    assert len(stream.sent(DeadLetter)) == 1


async def test_a_missing_blob_is_waited_for_and_then_costs_one_record(stream: Bench) -> None:
    blobs = stream.processor.blobs
    blobs.put(b"the store answers")
    lost, late = feedback("lost"), feedback("late")
    records = []
    for event in (lost, late):
        ref = blobs.ref(event.to_json())
        record = stream.append("feedback", ref.model_dump_json().encode(), event)
        records.append(replace(record, headers=(*record.headers, ("ce_dataref", ref.uri.encode()))))
    blobs.put(late.to_json())
    await stream.deliver(*records, feedback("a"))
    assert await handled_ids(stream) == ["late", "a"]
    (letter,) = stream.sent(DeadLetter)
    assert (letter.reason, letter.source_offset) == ("missing_blob", 0)


async def test_a_store_that_is_away_is_no_missing_blob(stream: Bench) -> None:
    ref = stream.processor.blobs.ref(b"x" * 10)
    record = stream.append("feedback", ref.model_dump_json().encode())
    with pytest.raises(Unavailable):
        await stream.deliver(replace(record, headers=(("ce_dataref", ref.uri.encode()),)))
    assert stream.sent(DeadLetter) == []


async def test_a_serialization_failure_is_tried_again_and_is_no_poison(stream: Bench, handlers: Handlers) -> None:
    conflict = RuntimeError("could not serialize access")
    conflict.sqlstate = "40001"  # type: ignore[attr-defined]
    handlers.on["a"] = [DBAPIError("UPDATE", None, conflict)] * 5
    await stream.deliver(feedback("a"))
    assert await handled_ids(stream) == published(stream) == ["a"]
    assert stream.sent(DeadLetter) == []


async def test_a_consumer_without_room_for_refusals_stops_and_goes_on_when_told(
    stream: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "HELD_RECORDS_MAX", 2)
    stream.processor._limits = TenantLimits(RefusalBounds(run_max=3))
    records = [stream.append("feedback", b"{") for _ in range(8)]
    work = asyncio.create_task(stream.deliver(*records, feedback("a")))
    await _until(lambda: len(stream.sent(DeadLetter)) == 3)
    assert "3 records in a row" in (stream.processor.paused or "")
    assert [letter.source_offset for letter in stream.sent(DeadLetter)] == [0, 1, 2]
    await stream.step(_nothing)  # timers go on
    assert not work.done()
    stream.processor._limits = TenantLimits(RefusalBounds())
    stream.processor.resume()
    await work
    assert len(stream.sent(DeadLetter)) == 8
    assert await handled_ids(stream) == ["a"]


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - a field of the processor, not an event
            await asyncio.sleep(0.01)


async def _nothing(_tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
    return []


async def test_steps_are_repeated_while_they_are_unfinished(stream: Bench) -> None:
    left: list[list[Event]] = [Unfinished(), Unfinished(), []]
    ran: list[int] = []

    async def some(_tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
        ran.append(len(left))
        return left.pop(0)

    await run_until_finished(stream.clock, lambda: stream.processor.step(some))
    assert ran == [3, 2, 1]
