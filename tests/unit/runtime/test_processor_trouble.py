"""How often and when the processor tries what fails, what it blames for it, and what it counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from sqlalchemy import MetaData
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.errors import InvalidEvent, Unavailable
from headrace_runtime.processor import Handling, ProcessorLimits, StepFailed, in_turns, position
from headrace_runtime.refusal_limit import RefusalBounds, RefusalLimit
from headrace_runtime.stream_tables import StreamTables
from headrace_runtime.wire import Outgoing
from headrace_schemas import DeadLetter, Event, Feedback, Reward
from headrace_schemas.ids import session_key
from tests.support.streams import START, Bench, ManualClock, Service, bench

metadata = MetaData()
tables = StreamTables(metadata)
KEY = session_key("default", "s")
REFUSAL = InvalidEvent("unknown_target", "no such turn")


def feedback(name: str, time: datetime = START) -> Feedback:
    return Feedback(time=time, feedback_id=name, session_key=KEY, value=1.0)


def sample(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"headrace_{name}", labels) or 0.0


class Handler:
    """Owes a reward for each feedback. `on` maps a feedback id to the errors that it meets, one a try."""

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
    async with bench(service, database_url, data_dir) as made:
        yield made


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
    """The first try ends when the minute does: one more follows, and its failure is the last."""
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
    with pytest.raises(StepFailed, match="a bug"):
        await stream.deliver(feedback("a"))
    assert len(ran) == 1


async def test_a_step_that_breaks_on_a_batch_is_not_tried_on_parts_of_it(stream: Bench) -> None:
    async def after_batch(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
        if (await position(tx, tables, "feedback"))[0] == 2:
            raise ValueError("a bug")
        return []

    stream.processor.after_batch = after_batch
    with pytest.raises(StepFailed):
        await stream.deliver(*stream.produce(feedback("a"), feedback("b")))
    assert await stream.count("seen") == 0


async def test_timed_work_that_breaks_is_named_once(stream: Bench) -> None:
    async def sweep(_tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
        raise ValueError("a bug")

    with pytest.raises(StepFailed) as caught:
        await stream.step(sweep)
    assert str(caught.value).endswith("sweep: ValueError('a bug')")
    assert str(caught.value).count(":") == 1


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
    stream.processor._refusals = RefusalLimit(RefusalBounds(run_max=3))
    assert sample("consumer_paused", service="test") == 0
    handler.on = {name: [REFUSAL] * 9 for name in "abcdef"}
    work = asyncio.create_task(stream.deliver(*map(feedback, "abcdef"), feedback("good")))
    assert "3 records in a row" in await paused(stream)
    assert refused(stream) == [0, 1, 2]
    assert sample("consumer_paused", service="test") == 1
    stream.processor.resume()
    await work
    assert refused(stream) == [0, 1, 2, 3, 4, 5]
    assert handler.tried[-1] == "good"
    assert sample("consumer_paused", service="test") == 0


async def test_a_good_record_ends_a_run_of_refusals(stream: Bench) -> None:
    stream.processor._refusals = RefusalLimit(RefusalBounds(run_max=1))
    await stream.deliver(feedback("a"))
    poison = [stream.append("feedback", b"{") for _ in range(2)]
    work = asyncio.create_task(stream.deliver(*poison))
    await paused(stream)
    assert refused(stream) == [1]
    stream.processor.resume()
    await work
    assert refused(stream) == [1, 2]


async def test_a_refused_event_without_headers_is_named_by_its_own_id(stream: Bench, handler: Handler) -> None:
    event = feedback("a")
    handler.on["a"] = [REFUSAL] * 2
    await stream.deliver(stream.append("feedback", event.to_json()))
    assert [letter.source_id for letter in stream.sent(DeadLetter)] == [event.event_id]


async def test_without_a_bus_to_ask_a_handler_is_told_no_ends(stream: Bench, handler: Handler) -> None:
    stream.processor.ends = None
    await stream.deliver(feedback("a"))
    assert handler.ends == [{}]


async def test_an_id_is_known_for_eight_days(stream: Bench) -> None:
    await stream.deliver(feedback("a"))
    stream.clock.advance(timedelta(days=8).total_seconds())
    await stream.processor.prune()
    assert await stream.count("seen") == 1
    stream.clock.advance(0.001)
    await stream.processor.prune()
    assert await stream.count("seen") == 0


async def test_what_became_of_records_is_counted_and_an_event_from_the_future_has_no_age(stream: Bench) -> None:
    names = ["handled", "duplicate", "refused"]

    def counts() -> list[float]:
        found = [sample("events_handled_total", topic="feedback", outcome=name) for name in names]
        return [*found, *(sample(f"event_age_seconds_{what}", topic="feedback") for what in ("count", "sum"))]

    before = counts()
    ahead = START + timedelta(hours=1)
    first, again = stream.produce(feedback("a", ahead), feedback("a", ahead))
    await stream.deliver(first, again, feedback("b", ahead), stream.append("feedback", b"{"))
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [2, 1, 1, 3, 0]


async def test_between_two_turns_it_rests_as_long_as_the_turn_took() -> None:
    clock = ManualClock()
    clock.advance(100)
    takes_s = [3.0, 0.0, 0.0]

    async def work() -> bool:
        clock.advance(takes_s.pop(0))
        return bool(takes_s)

    await in_turns(clock, work)
    assert clock.monotonic_s() == pytest.approx(100 + 3 + 3 + 0.005)
