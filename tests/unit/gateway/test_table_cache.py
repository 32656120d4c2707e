"""Tests of the gateway's cached tables, of log ends in feedback, and of reports about feedback that cannot train.

A gateway that starts without the bus uses its cached tables. Feedback records log ends at its arrival that are not
before its turns. The answer to feedback reports if the algorithm or the sampling of a turn prevents training.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest
from aiokafka.partitioner import murmur2

from headrace_gateway.capture import recent_turns
from headrace_gateway.capture.publisher import Publisher
from headrace_gateway.capture.spool import Spool
from headrace_gateway.requests.feedback import LogEnds, end_offsets_of
from headrace_gateway.routing.table_cache import TableCache
from headrace_gateway.settings import CaptureSettings
from headrace_runtime.kafka.consumer import Offsets
from headrace_runtime.kafka.wire import Outgoing, Record, decode
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Feedback, Routing, Trajectory
from headrace_schemas.events.checkpoint import LearnedSignals
from headrace_schemas.values import ids
from tests.support.fake_replica import FakeReplica
from tests.support.gateway import Gateway, ListBus, ListProducer, gateway, routing, until
from tests.support.turns import ask, user
from tests.unit.collector.conftest import collector, pass_time

V1, V2, OTHER = "tiny@" + "1" * 16, "tiny@" + "2" * 16, "other@" + "3" * 16


@dataclass
class Topic:
    """Compacted topic that becomes readable when the test calls `comes`. `told` has the rows that the gateway
    received."""

    rows: dict[str, Routing] = field(default_factory=dict)
    loaded: asyncio.Event = field(default_factory=asyncio.Event)
    told: list[tuple[str, Routing | None]] = field(default_factory=list)

    def comes(self, *rows: Routing) -> None:
        self.rows = {row.key: row for row in rows}
        self.loaded.set()


@contextlib.asynccontextmanager
async def open_cache(path: Path, topic: Topic, wait_s: float = 0.02) -> AsyncIterator[TableCache[Routing]]:
    cache = TableCache(Routing, path, topic, lambda key, row: topic.told.append((key, row)), wait_s)
    running = asyncio.create_task(cache.run(every_s=0.01))
    try:
        yield cache
    finally:
        running.cancel()
        await asyncio.wait([running])


def file_contains(path: Path, text: str) -> bool:
    return path.exists() and text in path.read_text(encoding="utf-8")


async def known_from_before(path: Path, *rows: Routing) -> None:
    topic = Topic()
    topic.comes(*rows)
    async with open_cache(path, topic):
        await until(lambda: file_contains(path, rows[-1].key))
    assert topic.told == [], "the table itself tells what the topic has"


async def test_a_late_bus_is_stood_in_for_and_what_it_no_longer_has_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "known" / "routing"
    before = routing(V1), routing(OTHER)
    await known_from_before(path, *before)
    topic = Topic()
    async with open_cache(path, topic) as cache:
        await until(lambda: cache.used)
        assert topic.told == [(row.key, row) for row in before]
        topic.comes(routing(V2))
        await until(lambda: file_contains(path, V2))
    assert topic.told[2:] == [("other", None)]
    assert OTHER not in path.read_text(encoding="utf-8")


async def test_a_bus_in_time_is_all_that_counts(tmp_path: Path) -> None:
    path = tmp_path / "routing"
    await known_from_before(path, routing(V1))
    topic = Topic()
    topic.comes(routing(V2))
    async with open_cache(path, topic, wait_s=10) as cache:
        await until(lambda: file_contains(path, V2))
    assert topic.told == []
    assert not cache.used


async def test_a_damaged_line_costs_its_row(tmp_path: Path) -> None:
    path = tmp_path / "routing"
    await known_from_before(path, routing(V1), routing(OTHER))
    first, second = path.read_bytes().splitlines()
    path.write_bytes(first[: len(first) // 2] + b"\n\xff" + second[1:] + b"\n" + second)
    topic = Topic()
    async with open_cache(path, topic):
        await until(lambda: topic.told)
    assert [key for key, _ in topic.told] == ["other"]


async def test_no_file_is_nothing_known(tmp_path: Path) -> None:
    topic = Topic()
    async with open_cache(tmp_path / "none", topic) as cache:
        await asyncio.sleep(0.1)
        assert topic.told == []
        assert not cache.used
        topic.comes(routing(V1))
        await until(lambda: file_contains(tmp_path / "none", V1))


class Ends:
    """Log ends of two partitions, which the test sets. `ends` returns after the event `go` is set."""

    def __init__(self) -> None:
        self.end = 0
        self.asked = 0
        self.go = asyncio.Event()
        self.go.set()

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def ends(self, _topic: str) -> Mapping[int, int]:
        self.asked += 1
        found = {0: self.end, 1: 100 + self.end}
        await self.go.wait()
        return found


def reach(ends: Ends) -> LogEnds:
    return LogEnds(cast("Offsets", ends))


async def test_who_asks_together_shares_an_answer_that_is_not_older_than_the_asking() -> None:
    ends = Ends()
    shared = reach(ends)
    ends.go.clear()
    first = asyncio.create_task(shared.ends())
    await until(lambda: ends.asked == 1)
    ends.end = 7  # a turn that was acknowledged after the first question and before the others
    tasks = [asyncio.create_task(shared.ends()) for _ in range(20)]
    await asyncio.sleep(0)
    ends.go.set()
    assert {offsets["turns"][0] for offsets in await asyncio.gather(*tasks)} == {7}
    assert (await first)["turns"][0] == 0
    assert ends.asked == 4, "two topics, two questions"


def test_the_partition_is_that_of_the_key() -> None:
    for name in "abcdef":
        key = ids.session_key("default", name)
        number = (murmur2(key.encode()) & 0x7FFFFFFF) % 2
        assert end_offsets_of({"turns": {0: 5, 1: 6}, "trajectories": {}}, key) == {"turns": 5 + number}


def feedback(value: float, *msg_ids: str) -> Feedback:
    key = ids.session_key("default", "s")
    return Feedback(time=datetime.now(UTC), feedback_id=str(value), session_key=key, value=value, msg_ids=msg_ids)


async def sent(record: Outgoing, blobs: BlobStore) -> Mapping[str, int] | None:
    read = Record(record.topic, 0, 0, record.key, record.value, record.headers)
    return (await decode(read, blobs)).envelope.after


async def test_what_waited_in_the_spool_says_how_far_the_logs_reach_when_it_is_sent(tmp_path: Path) -> None:
    """Turns that are in the spool before the feedback are also before it in the log."""
    ends, bus, blobs = Ends(), ListBus(), BlobStore((tmp_path / "blobs").as_uri())
    bus.back.clear()
    settings = CaptureSettings(bus_wait_s=0.1)
    async with Spool(tmp_path / "spool", 1 << 20) as spool:
        publisher = Publisher(
            lambda: ListProducer(bus, blobs), spool, settings, send_timeout_s=0.2, log_ends=lambda: reach(ends)
        )
        draining = asyncio.create_task(publisher.run())
        await publisher.publish(feedback(0.0), feedback(1.0, ids.response_id(ids.session_key("default", "s"))))
        ends.end = 9
        bus.back.set()
        await until(lambda: len(bus.records) == 2)
        await until(lambda: spool.events == 0)
        ends.end = 12
        await publisher.publish(feedback(2.0))
        reached = [await sent(record, blobs) for record in bus.records]
        assert [offsets["turns"] % 100 if offsets else None for offsets in reached] == [9, None, 12], (
            "a list needs no such thing"
        )
        draining.cancel()
        await asyncio.wait([draining])


async def test_one_tenant_cannot_take_the_whole_spool_and_a_refusal_says_why(tmp_path: Path) -> None:
    from headrace_gateway.access.refusals import ApiError

    def refusal_text(tenant: str) -> str:
        try:
            publisher.admit(tenant)
        except ApiError as error:
            return str(error)
        return ""

    bus, blobs = ListBus(), BlobStore((tmp_path / "blobs").as_uri())
    settings = CaptureSettings(bus_wait_s=0.1, spool_bytes_max=4000)
    bus.back.clear()
    async with Spool(tmp_path / "spool", 4000) as spool:
        publisher = Publisher(lambda: ListProducer(bus, blobs), spool, settings, send_timeout_s=0.2, tenants=2)
        hostile_feedback = feedback(0.0).model_copy(update={"tenant": "hostile", "comment": "x" * 2000})
        await publisher.publish(hostile_feedback)
        assert "tenant's part of the spool (half of capture.spool_bytes_max) is full" in refusal_text("hostile")
        assert refusal_text("other") == ""
        await publisher.publish(hostile_feedback, hostile_feedback)
        assert "the spool is full and the bus is unavailable" in refusal_text("other")
    async with Spool(tmp_path / "spool", 4000) as spool:
        publisher = Publisher(lambda: ListProducer(bus, blobs), spool, settings, send_timeout_s=0.2, tenants=2)
        draining = asyncio.create_task(publisher.run())
        await until(lambda: "hostile" in str(publisher._shares._bytes))
        bus.back.set()
        await until(lambda: spool.events == 0 and publisher._shares.of("hostile") == 0)
        assert refusal_text("hostile") == ""
        publisher._shares.load({"hostile": 5000})
        assert "the bus, which is available again" in refusal_text("hostile"), "the bus is available"
        draining.cancel()
        await asyncio.wait([draining])


FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
TOOL = {"type": "function", "function": {"name": "look"}}
ASKED: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"temperature": 0.7}, None),
    ({"temperature": 0}, "truncated_sampling"),
    ({"temperature": 1e-39}, "truncated_sampling"),
    ({"top_p": 0.9}, "truncated_sampling"),
    ({"top_k": 5}, "truncated_sampling"),
    ({"min_p": 0.1}, "truncated_sampling"),
    ({"presence_penalty": 0.5}, None),
    ({"frequency_penalty": -1, "logit_bias": {"5": 2}}, None),
    ({"frequency_penalty": -1, "top_p": 0.9}, "truncated_sampling"),
    ({"response_format": FORMAT}, "truncated_sampling (grammar)"),
    ({"tools": [TOOL], "tool_choice": "required"}, "truncated_sampling (grammar)"),
]
KINDS: dict[str, tuple[bool, bool, bool, bool]] = {
    "reinforce++": (True, False, False, True),
    "mix": (True, True, False, True),
    "on_policy_distill": (False, False, False, True),
    "sft": (False, True, False, False),
    "dpo": (False, True, True, False),
    "kto": (True, True, True, False),
    "rft": (True, False, False, False),
}
"""Whether each algorithm trains rewards, edits and preferences, and needs logprobs."""


def signals(algorithm: str) -> LearnedSignals:
    names = "rewards", "edits", "preferences", "logprobs"
    return LearnedSignals.model_validate({"algorithm": algorithm, **dict(zip(names, KINDS[algorithm], strict=True))})


def replica() -> FakeReplica:
    return FakeReplica(grammars=("response_format", "tool_choice"))


async def chat_id(served: Gateway, **fields: Any) -> str:
    answer = await served.chat(str(fields), **fields)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def send_feedback(served: Gateway, **fields: Any) -> dict[str, Any]:
    answer = await served.client.post("/v1/feedback", json=fields)
    assert answer.status_code == 202, answer.text
    body: dict[str, Any] = answer.json()
    return {name: body[name] for name in ("teaches", "reason") if name in body}


def expected_fields(reason: str | None) -> dict[str, Any]:
    return {"teaches": True} if reason is None else {"teaches": False, "reason": reason}


@pytest.mark.parametrize(("fields", "reason"), ASKED, ids=lambda value: str(value)[:40])
async def test_feedback_on_a_turn_without_logprobs_reports_that_it_trains_no_policy_gradient(
    tmp_path: Path, fields: dict[str, Any], reason: str | None
) -> None:
    fake = replica()
    async with fake.running(), gateway(tmp_path, fake, learns=signals("mix")) as served:
        name = await chat_id(served, **fields)
        assert await send_feedback(served, response_id=name, value=1) == expected_fields(reason)
        assert await send_feedback(served, response_id=name, edit="better") == expected_fields(None), (
            "an edit needs no logprobs"
        )
        assert await send_feedback(served, response_id=name, comment="only a fact") == {}
        other = await chat_id(served)
        assert await send_feedback(served, msg_ids=[name, other], value=0) == expected_fields(None)
        trinity = await served.client.post("/feedback", json={"msg_ids": [name], "reward": 1})
        assert trinity.json() == {"status": "success", **(expected_fields(reason) if reason else {})}
        turns = served.turns
    async with collector("sqlite", tmp_path / "collector") as stream:
        await stream.deliver(turns[0])
        await pass_time(stream, 3000)
        (trajectory,) = stream.sent(Trajectory)
    assert [span.no_logprobs for branch in trajectory.branches for span in branch.spans] == [reason], "the same rule"


@pytest.mark.parametrize("algorithm", KINDS)
async def test_the_answer_is_that_of_the_algorithm(tmp_path: Path, algorithm: str) -> None:
    fake, learns = replica(), signals(algorithm)
    async with fake.running(), gateway(tmp_path, fake, learns=learns) as served:
        free, greedy = await chat_id(served), await chat_id(served, temperature=0)
        lacking = "truncated_sampling" if learns.logprobs else None
        rewards, edits, preferences = (None if kind else "no_signal" for kind in KINDS[algorithm][:3])
        assert await send_feedback(served, response_id=free, value=1) == expected_fields(rewards)
        assert await send_feedback(served, response_id=greedy, value=1) == expected_fields(rewards or lacking)
        assert await send_feedback(served, response_id=greedy, edit="better") == expected_fields(edits)
        pair = {"preference": {"chosen": free, "rejected": greedy}}
        assert await send_feedback(served, **pair) == expected_fields(preferences or lacking)
        evaluated = await chat_id(served, metadata={"purpose": "eval"})
        assert await send_feedback(served, response_id=evaluated, edit="better") == expected_fields("eval")


async def test_a_value_may_train_the_other_turns_of_its_run(tmp_path: Path) -> None:
    fake = replica()
    async with fake.running(), gateway(tmp_path, fake, learns=signals("reinforce++")) as served:
        session = {"metadata": {"session_id": "one"}}
        greedy = await chat_id(served, temperature=0, **session)
        assert await send_feedback(served, response_id=greedy, value=1) == expected_fields("truncated_sampling")
        await chat_id(served, **session)
        assert await send_feedback(served, response_id=greedy, value=1) == {}, "their branch is not known here"


async def test_what_the_gateway_does_not_know_it_does_not_say(tmp_path: Path) -> None:
    fake = replica()
    unknown = ids.response_id(ids.session_key("default", "s"))
    async with fake.running(), gateway(tmp_path, fake, learns=signals("kto")) as served:
        evaluated, trained = await chat_id(served, metadata={"purpose": "eval"}), await chat_id(served)
        assert await send_feedback(served, response_id=unknown, value=1) == {}
        assert await send_feedback(served, session_id="s", value=1) == {}
        assert await send_feedback(served, level="task", task_id="t", value=1) == {}
        assert await send_feedback(served, msg_ids=[unknown, evaluated], value=1) == {}
        assert await send_feedback(served, msg_ids=[unknown, trained], value=1) == {"teaches": True}
        assert await send_feedback(served, preference={"chosen": unknown, "rejected": trained}) == {}
        assert await send_feedback(served, preference={"chosen": unknown, "rejected": evaluated}) == expected_fields(
            "eval"
        )
        assert await send_feedback(served, response_id=evaluated, withdrawn=True) == {}


async def test_without_an_announced_algorithm_only_untrained_turns_are_reported(tmp_path: Path) -> None:
    fake = replica()
    async with fake.running(), gateway(tmp_path, fake) as served:
        free, greedy = await chat_id(served), await chat_id(served, temperature=0)
        evaluated = await chat_id(served, metadata={"purpose": "eval"})
        answers = [await send_feedback(served, response_id=name, value=1) for name in (free, greedy, evaluated)]
        assert answers == [{}, {}, expected_fields("eval")]


def test_only_the_last_responses_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_turns, "TURNS_MAX", 3)
    recent = recent_turns.RecentTurns()
    key = ids.session_key("a", "s")
    names = [ids.response_id(key) for _ in range(5)]

    def teaching(name: str, tenant: str = "a") -> recent_turns.TrainingEffect | None:
        event = Feedback.model_validate(
            {"time": "2026-01-01T00:00:00Z", "feedback_id": "f", "session_key": key, "tenant": tenant, "value": 1.0,
             "msg_ids": (name,)}
        )  # fmt: skip
        return recent.training_effect([event])

    for name in names:
        recent.note("a", name, ask([user("q")], delivered=False, turn_id=name))
    outcomes = [teaching(name) for name in names]
    assert [outcome is not None for outcome in outcomes] == [False, False, True, True, True]
    assert outcomes[-1] == recent_turns.TrainingEffect(False, "undelivered")
    assert teaching(names[-1], "b") is None, "another tenant learns nothing about a response"
