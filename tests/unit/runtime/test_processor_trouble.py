"""Tests of the processor's retries: their number, their delays, the blamed record, and the metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from sqlalchemy import MetaData
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.errors import InvalidEvent, Unavailable
from headrace_runtime.kafka.wire import Outgoing
from headrace_runtime.settings.sections import RefusalBounds
from headrace_runtime.storage.tables import StreamTables
from headrace_runtime.stream import delivery
from headrace_runtime.stream.pausing import TenantLimits
from headrace_runtime.stream.processor import Handling, ProcessorLimits, StepFailed, read_positions
from headrace_schemas import DeadLetter, Event, Feedback, Reward
from headrace_schemas.values.ids import session_key
from tests.support.streams import Bench, Service, bench
from tests.support.turns import START

metadata = MetaData()
tables = StreamTables(metadata)
KEY = session_key("default", "s")
REFUSAL = InvalidEvent("unknown_target", "no such turn")


def feedback(name: str, time: datetime = START) -> Feedback:
    return Feedback(time=time, feedback_id=name, session_key=KEY, value=1.0)


def sample(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"headrace_{name}", labels) or 0.0


class Handler:
    """Handler that returns a reward for each feedback. `on` maps a feedback id to one error for each attempt."""

    def __init__(self) -> None:
        self.on: dict[str, list[Exception]] = {}
        self.tried: list[str] = []
        self.tried_s: list[float] = []
        self.ends: list[object] = []

    async def __call__(self, event: Feedback, handling: Handling) -> Sequence[Event]:
        self.tried.append(event.feedback_id)
        self.tried_s.append((handling.now - START).total_seconds())
        self.ends.append(dict(handling.ends))
        if self.on.get(event.feedback_id):
            raise self.on[event.feedback_id].pop(0)
        return [Reward(time=handling.now, trajectory_id=event.feedback_id, session_key=KEY, source="f", value=1.0)]


@pytest.fixture
def handler() -> Handler:
    return Handler()


@pytest.fixture
async def stream(handler: Handler, database_url: str, data_dir: Path) -> AsyncIterator[Bench]:
    service = Service(tables, {"feedback": handler}, ends_of={"feedback": ("turns",)})
    async with bench(service, database_url, data_dir) as service_bench:
        yield service_bench


def refused(stream: Bench) -> list[int | None]:
    return [letter.source_offset for letter in stream.sent(DeadLetter)]


async def paused(stream: Bench) -> str:
    async with asyncio.timeout(10):
        while stream.processor.paused is None:  # noqa: ASYNC110 - a field of the processor, not an event
            await asyncio.sleep(0.01)
    return stream.processor.paused


async def test_what_is_away_is_asked_ever_more_rarely_until_its_time_is_over(stream: Bench, handler: Handler) -> None:
    stream.processor.limits = ProcessorLimits(retry_s=13.75)
    handler.on["a"] = [Unavailable("away")] * 99
    with pytest.raises(Unavailable):
        await stream.deliver(feedback("a"))
    assert handler.tried_s == pytest.approx([0, 0.05, 0.25, 0.75, 1.75, 3.75, 8.75, 13.75, 18.75])


async def test_a_minute_is_what_it_waits_unless_told_otherwise(
    stream: Bench, handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt ends after a minute. One more attempt follows, and its failure is final."""
    stream.processor.limits = ProcessorLimits()
    encode = stream.processor.outbox.encode

    async def slowly(events: Sequence[Event]) -> list[Outgoing]:
        stream.clock.advance(max(0.0, 60.0 - stream.clock.monotonic_s()))
        return await encode(events)

    monkeypatch.setattr(stream.processor.outbox, "encode", slowly)
    handler.on["a"] = [Unavailable("away")] * 99
    with pytest.raises(Unavailable):
        await stream.deliver(feedback("a"))
    assert len(handler.tried) == 2


async def test_a_record_that_breaks_its_handler_has_three_tries_of_its_own(stream: Bench, handler: Handler) -> None:
    handler.on = {"a": [RuntimeError("broken")] * 3, "b": [RuntimeError("broken")] * 4}
    await stream.deliver(feedback("a"))
    assert (handler.tried, refused(stream)) == (["a"] * 4, []), "one in its batch, three alone"
    await stream.deliver(feedback("b"))
    assert (handler.tried[4:], refused(stream)) == (["b"] * 4, [1])


async def test_what_is_away_when_a_record_is_tried_alone_is_waited_for_too(stream: Bench, handler: Handler) -> None:
    handler.on["a"] = [RuntimeError("splits the batch"), *[Unavailable("away")] * 5]
    await stream.deliver(feedback("a"))
    assert refused(stream) == []
    assert [reward.trajectory_id for reward in stream.sent(Reward)] == ["a"]


async def test_a_broken_step_is_not_tried_again_for_a_record_alone(stream: Bench, handler: Handler) -> None:
    ran: list[datetime] = []

    async def after_batch(_tx: AsyncConnection, now: datetime) -> Sequence[Event]:
        ran.append(now)
        raise ValueError("a bug")

    stream.processor.after_batch = after_batch
    handler.on["a"] = [RuntimeError("splits the batch")]
    await stream.deliver(feedback("a"))
    assert len(ran) == 1, "a record alone has its items isolated at once"
    assert handler.tried == ["a", "a", "a"], "with the batch; alone with the step, and without it"


async def test_a_step_that_breaks_on_a_batch_is_not_tried_on_parts_of_it(stream: Bench) -> None:
    async def after_batch(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
        if (await read_positions(tx, tables, "feedback"))[0] == 2:
            raise ValueError("a bug")
        return []

    stream.processor.after_batch = after_batch
    await stream.deliver(*stream.produce(feedback("a"), feedback("b")))
    assert (await stream.count("seen"), refused(stream)) == (2, [])


async def test_timed_work_that_breaks_is_named_once(stream: Bench) -> None:
    async def sweep(_tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
        raise ValueError("a bug")

    with pytest.raises(StepFailed) as caught:
        await stream.step(sweep)
    assert str(caught.value).endswith("sweep: ValueError: a bug")


def _conflict() -> DBAPIError:
    error = RuntimeError("could not serialize access")
    error.sqlstate = "40001"  # type: ignore[attr-defined]
    return DBAPIError("UPDATE", None, error)


@pytest.mark.parametrize(
    "error", [_conflict(), ConnectionResetError("gone"), Unavailable("away")], ids=["conflict", "connection", "away"]
)
async def test_timed_work_is_tried_again_when_that_may_help(stream: Bench, error: Exception) -> None:
    errors = [error]

    async def work(_tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
        if errors:
            raise errors.pop()
        return []

    await stream.step(work)
    assert errors == []


async def _nothing(_tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
    return []


async def test_what_a_commit_that_failed_owed_is_not_sent_after_the_next(
    stream: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = stream.processor.outbox
    add = outbox.add

    async def then_fail(tx: AsyncConnection, records: Sequence[Outgoing]) -> None:
        await add(tx, records)
        raise Unavailable("the commit failed")

    with monkeypatch.context() as patch:
        patch.setattr(outbox, "add", then_fail)
        with pytest.raises(Unavailable):
            await stream.deliver(feedback("a"))
    await stream.step(_nothing)
    assert stream.sent(Reward) == []


async def test_events_that_their_handler_refuses_pause_the_consumer_too(stream: Bench, handler: Handler) -> None:
    stream.processor._limits = TenantLimits(RefusalBounds(run_max=3))
    assert sample("consumer_paused", service="test") == 0
    handler.on = {name: [REFUSAL] * 9 for name in "abcdef"}
    await stream.deliver(*map(feedback, "abcdef"))
    assert "3 records in a row" in await paused(stream)
    assert refused(stream) == [0, 1, 2]
    assert sample("consumer_paused", service="test") == 1
    assert sample("records_held", service="test") == 3
    stream.processor.resume()
    await stream.deliver(feedback("good"))
    assert refused(stream) == [0, 1, 2, 3, 4, 5]
    assert handler.tried[-1] == "good"
    assert sample("consumer_paused", service="test") == 0


async def test_a_good_record_ends_a_run_of_refusals(stream: Bench) -> None:
    stream.processor._limits = TenantLimits(RefusalBounds(run_max=1))
    bad = b'{"tenant": "default"}'
    await stream.deliver(stream.append("feedback", bad))
    await stream.deliver(feedback("a"))
    await stream.deliver(stream.append("feedback", bad), stream.append("feedback", bad))
    assert refused(stream) == [0, 2]
    assert await stream.count("jobs") == 1, "the third refusal is the second in a row"


def _of(tenant: str, name: str) -> Feedback:
    return Feedback(time=START, feedback_id=name, tenant=tenant, session_key=session_key(tenant, "s"), value=1.0)


async def test_a_flood_of_one_tenant_holds_back_nobody_else(stream: Bench, handler: Handler) -> None:
    """The step is isolated in the first batch, too, before any other step has succeeded."""
    stream.processor._limits = TenantLimits(RefusalBounds(run_max=10))
    handler.on = {f"bad{number}": [REFUSAL] * 9 for number in range(140)}
    await stream.deliver(*[_of("flooder", f"bad{number}") for number in range(130)])
    assert len(refused(stream)) == 10
    for number in range(5):
        await stream.deliver(_of("flooder", f"bad{130 + number}"), _of("other", f"good{number}"))
    assert stream.processor.paused is None
    assert [reward.trajectory_id for reward in stream.sent(Reward)] == [f"good{number}" for number in range(5)]
    assert sample("records_held", service="test") == 125


async def test_records_without_a_readable_tenant_count_as_one_tenant(stream: Bench) -> None:
    stream.processor._limits = TenantLimits(RefusalBounds(run_max=10))
    values = [b"{", b"[]", b"\xff", b'{"tenant": 7}', b"", None, b"[" * 100_000, b'"tenant"']
    await stream.deliver(*[stream.append("feedback", value) for value in values for _ in range(5)])
    await stream.deliver(feedback("good"))
    assert (len(refused(stream)), await stream.count("jobs")) == (10, 30)
    assert [reward.trajectory_id for reward in stream.sent(Reward)] == ["good"]
    assert stream.processor.paused is None


async def test_what_was_kept_back_is_tried_again_after_a_restart(
    database_url: str, data_dir: Path, handler: Handler
) -> None:
    service = Service(tables, {"feedback": handler})
    async with bench(service, database_url, data_dir) as stream:
        stream.processor._limits = TenantLimits(RefusalBounds(run_max=3))
        handler.on = {name: [REFUSAL] * 4 for name in "abcdef"}
        for name in "abcdef":
            await stream.deliver(feedback(name))
        assert (refused(stream), await stream.count("jobs")) == ([0, 1, 2], 3)
        handler.on.clear()  # the cause is mended
        restarted = replace(stream.processor)
        restarted._turn = asyncio.Lock()
        await restarted.prune()
        assert [reward.trajectory_id for reward in stream.sent(Reward)] == ["d", "e", "f"]
        assert await stream.count("jobs") == 0
        async with restarted.database.transaction() as tx:
            assert await read_positions(tx, tables, "feedback") == {0: 6}, "positions do not go back"


async def test_a_tenant_without_room_is_dead_lettered_while_others_are_handled(
    stream: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "HELD_RECORDS_MAX", 2)
    stream.processor._limits = TenantLimits(RefusalBounds(run_max=3))
    await stream.deliver(_of("other", "good"))
    bad = [stream.append("feedback", b'{"tenant": "flooder"}') for _ in range(20)]
    await stream.deliver(*bad)
    assert (len(refused(stream)), await stream.count("jobs")) == (18, 2)
    assert stream.processor.paused is None
