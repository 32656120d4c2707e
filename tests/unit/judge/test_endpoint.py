"""Tests of failures of an endpoint, and of the call budget.

Each failure has its own error, and no message quotes the request. The budget counts calls before they are made,
survives restarts, and is renewed with each period.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import tracemalloc
import zlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from pathlib import Path

import pytest

from headrace_judge.call_budget import BudgetLimit, CallBudget, CircuitBreaker, Reservation
from headrace_judge.endpoint import CallRefused, CallTimedOut, Completion, Endpoint, EndpointUnavailable, retry_after_s
from headrace_judge.run_transcript import ChatMessage
from headrace_judge.settings import BudgetSettings, EndpointSettings, RetrySettings
from headrace_judge.tables import STREAM
from headrace_judge.worker import backoff_s
from headrace_schemas.values.base import utcnow
from tests.attack.inputs import mutate
from tests.support import fake_llm
from tests.support.fake_llm import Call, FakeLLM, Reply
from tests.support.streams import Bench, ManualClock, Service, bench, judge, settings, trajectory
from tests.support.turns import START

ANSWER = {**fake_llm.completion('{"reason": "r", "criteria": {"a": 1}}'), "created": 1, "system_fingerprint": None}
MESSAGES: list[ChatMessage] = [{"role": "user", "content": "private"}]


async def complete(llm: FakeLLM, key: str = "key", **changes: object) -> Completion:
    data = {"base_url": llm.base_url, "model": "m", "timeout_s": 0.3} | changes
    endpoint = Endpoint(EndpointSettings.model_validate(data), key)
    try:
        return await endpoint.complete(MESSAGES)
    finally:
        await endpoint.close()


async def test_an_answer_with_its_tokens(llm: FakeLLM) -> None:
    llm.then(fake_llm.say("hi", tokens=(7, 3)), fake_llm.say("hi", tokens=None))
    assert await complete(llm) == Completion(text="hi", tokens=10)
    assert (await complete(llm)).tokens is None
    assert llm.calls[0].headers["authorization"] == "Bearer key"
    assert llm.calls[0].body == {"model": "m", "messages": MESSAGES, "temperature": 0.0, "max_tokens": 1024}


async def test_fields_can_be_left_out_and_added(llm: FakeLLM) -> None:
    await complete(llm, omit=["temperature", "max_tokens"], extra={"max_completion_tokens": 9})
    assert llm.calls[0].body == {"model": "m", "messages": MESSAGES, "max_completion_tokens": 9}


def parts(*texts: str) -> fake_llm.Behaviour:
    thought = {"type": "thinking", "thinking": []}
    content = [thought, *({"type": "text", "text": text} for text in texts)]
    return fake_llm.raw(json.dumps({"choices": [{"message": {"content": content}}]}).encode())


@pytest.mark.parametrize(
    "usage", [{}, {"prompt_tokens": -1}, {"prompt_tokens": 10**400}, {"prompt_tokens": 2**52}, "many", [], 7]
)
async def test_an_answer_counts_whatever_its_bill_is(llm: FakeLLM, usage: object) -> None:
    document = {**fake_llm.completion("hi"), "id": None, "usage": usage}
    llm.then(fake_llm.raw(json.dumps(document).encode()))
    assert await complete(llm) == Completion(text="hi")


@pytest.mark.parametrize("padding", [0, 1015])
async def test_no_message_quotes_the_key_that_the_endpoint_repeats(llm: FakeLLM, padding: int) -> None:
    message = f"{'x' * padding} Incorrect API key provided: sk-0123456789abcdef"
    for body in (json.dumps({"error": {"message": message}}), message):
        llm.then(lambda _call, body=body: Reply(raw=body.encode(), status=401))  # type: ignore[misc]
        with pytest.raises(EndpointUnavailable) as refused:
            await complete(llm, key="sk-0123456789abcdef")
        assert "sk-0" not in str(refused.value)


async def test_an_answer_in_parts_is_their_text(llm: FakeLLM) -> None:
    llm.then(parts("4 ", "of 5"))
    assert (await complete(llm)).text == "4 of 5"


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "GZIP", "identity"])
async def test_an_answer_may_be_compressed_as_requested(llm: FakeLLM, encoding: str) -> None:
    content = json.dumps(fake_llm.completion("hi")).encode()
    compressed = {"gzip": gzip.compress(content), "deflate": zlib.compress(content), "identity": content}
    llm.then(partial(_answer, Reply(raw=compressed[encoding.lower()], headers={"Content-Encoding": encoding})))
    assert (await complete(llm)).text == "hi"
    assert llm.calls[0].headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize("encoding", ["zstd", "br", "gzip, gzip", "deflate, gzip", "compress", "x" * 1000])
async def test_an_answer_in_another_encoding_is_not_decoded(llm: FakeLLM, encoding: str) -> None:
    bomb = gzip.compress(gzip.compress(bytes(10_000_000)))
    llm.then(partial(_answer, Reply(raw=bomb, headers={"Content-Encoding": encoding})))
    with pytest.raises(EndpointUnavailable, match="which was not requested") as raised:
        await complete(llm)
    assert str(raised.value).isprintable()


async def test_a_compressed_answer_is_bounded_by_its_decoded_size(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.then(partial(_answer, Reply(raw=gzip.compress(bytes(100_000_000)), headers={"Content-Encoding": "gzip"})))
    tracemalloc.start()
    try:
        monkeypatch.setattr("headrace_judge.endpoint.RESPONSE_BYTES_MAX", 2048)
        with pytest.raises(CallRefused, match="longer than 2048 bytes"):
            await complete(llm, timeout_s=30.0)
        assert tracemalloc.get_traced_memory()[1] < 90_000_000
    finally:
        tracemalloc.stop()


def _answer(reply: Reply, _call: Call) -> Reply:
    return reply


async def test_no_answer_is_an_unnamed_error(llm: FakeLLM) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    waits = [
        "1e400",
        "-1",
        "nan",
        "Mon, 01 Jan " + "9" * 30 + " 00:00:00 GMT",
        "Mon, 01 Jan 2030 00:00:00 +9999",
        "\xe9",
    ]
    endpoint = Endpoint(EndpointSettings.model_validate({"base_url": llm.base_url, "model": "m"}), "key")
    try:
        for _ in range(200):
            content = rng.choice((b"[" * 100_000, b"1" * 5000)) if rng.random() < 0.1 else mutate(ANSWER, rng)
            reply = Reply(status=rng.choice((200, 200, 200, 400, 429, 503)), raw=content)
            reply.headers["Retry-After"] = rng.choice(waits)
            llm.then(partial(_answer, reply))
            with contextlib.suppress(EndpointUnavailable, CallRefused):
                await endpoint.complete(MESSAGES)
    finally:
        await endpoint.close()


@pytest.mark.parametrize(
    "message", [fake_llm.say(None, refusal="I cannot"), fake_llm.say("x", refusal="no")], ids=["no text", "text"]
)
async def test_a_refusal_is_seen(llm: FakeLLM, message: fake_llm.Behaviour) -> None:
    llm.then(message)
    assert (await complete(llm)).refused


@pytest.mark.parametrize(
    ("behaviour", "error", "billed"),
    [
        (fake_llm.status(500), EndpointUnavailable, False),
        (fake_llm.status(401), EndpointUnavailable, False),
        (fake_llm.status(302), EndpointUnavailable, False),
        (fake_llm.drop(), EndpointUnavailable, True),
        (fake_llm.raw(b"{}"), EndpointUnavailable, True),
        (fake_llm.raw(b'{"choices": []}'), EndpointUnavailable, True),
        (fake_llm.status(400), CallRefused, None),
        (fake_llm.status(422), CallRefused, None),
        (fake_llm.say("x" * 3000), CallRefused, None),
        (fake_llm.hang(), CallTimedOut, None),
    ],
)
async def test_trouble_has_a_name(
    llm: FakeLLM,
    behaviour: fake_llm.Behaviour,
    error: type[Exception],
    billed: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm.then(behaviour)
    monkeypatch.setattr("headrace_judge.endpoint.RESPONSE_BYTES_MAX", 2048)
    with pytest.raises(error) as raised:
        await complete(llm)
    assert "private" not in str(raised.value)
    if isinstance(raised.value, EndpointUnavailable):
        assert raised.value.billed is billed


async def test_nobody_there(llm: FakeLLM) -> None:
    with pytest.raises(EndpointUnavailable, match="ConnectError") as raised:
        await complete(llm, base_url="http://127.0.0.1:9/v1")
    assert not raised.value.billed


def test_retry_after_is_a_number_or_a_date_and_bounded() -> None:
    assert retry_after_s("7", 60) == 7.0
    assert retry_after_s("7.5", 60) == 7.5
    assert retry_after_s("100000", 60) == 60.0
    assert retry_after_s("inf", 60) == 60.0
    assert retry_after_s("-3", 60) == 0.0
    for nonsense in (None, "", "soon", "nan"):
        assert retry_after_s(nonsense, 60) is None
    date = format_datetime(utcnow() + timedelta(seconds=30), usegmt=True)
    assert retry_after_s(date, 60) == pytest.approx(30, abs=2)
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT", 60) == 0.0


def test_waits_grow_to_a_limit_and_obey_the_endpoint() -> None:
    retry = RetrySettings()
    assert [backoff_s(attempts, None) for attempts in range(6)] == [1, 4, 16, 64, 256, 300]
    assert backoff_s(10**6, None) == 300
    assert backoff_s(0, 120.0) == 120.0
    total = sum(backoff_s(attempts, None) for attempts in range(retry.attempts_max - 1))
    assert 3600 < total < 2 * 3600, "an endpoint may be away for an hour"


def test_a_failure_holds_work_back_and_then_lets_one_try() -> None:
    clock = ManualClock()
    breaker = CircuitBreaker(clock, pause_s=1.0)
    assert breaker.free_slots(running=3, concurrency=8) == 5
    breaker.record_failure(None)
    breaker.record_failure(None)  # of the same moment: no longer pause
    assert breaker.free_slots(0, 8) == 0
    clock.advance(1.0)
    assert breaker.free_slots(0, 8) == 1
    assert breaker.free_slots(1, 8) == 0
    breaker.record_failure(None)
    clock.advance(1.9)
    assert breaker.free_slots(0, 8) == 0
    clock.advance(0.1)
    assert breaker.free_slots(0, 8) == 1
    breaker.record_success()
    assert breaker.free_slots(0, 8) == 8


def test_the_pause_has_a_limit_unless_the_endpoint_asks_for_more() -> None:
    clock = ManualClock()
    breaker = CircuitBreaker(clock, pause_s=1.0)
    for _ in range(50):
        breaker.record_failure(None)
        clock.advance(30.0)
        assert breaker.free_slots(0, 8) == 1
    breaker.record_failure(100.0)
    clock.advance(99.0)
    assert breaker.free_slots(0, 8) == 0
    clock.advance(1.0)
    assert breaker.free_slots(0, 8) == 1


LATE = datetime(2026, 3, 31, 23, 30, tzinfo=UTC)


@pytest.fixture
async def state(data_dir: Path) -> AsyncIterator[Bench]:
    async with bench(Service(STREAM, {}), "sqlite", data_dir) as opened:
        yield opened


async def reserve(state: Bench, budget: CallBudget, now: datetime, tokens: int = 10) -> Reservation | BudgetLimit:
    async with state.processor.database.transaction() as tx:
        return await budget.reserve(tx, now, tokens)


async def left(state: Bench, budget: CallBudget, now: datetime) -> dict[str, int]:
    async with state.processor.database.transaction() as tx:
        return await budget.remaining(tx, now)


async def test_calls_are_limited_per_hour_and_per_day(state: Bench) -> None:
    budget = CallBudget(BudgetSettings(calls_per_hour=2, calls_per_day=3))
    assert [type(await reserve(state, budget, LATE)) for _ in range(3)] == [Reservation, Reservation, BudgetLimit]
    assert str(await reserve(state, budget, LATE)) == "the budget is spent: judge.budget.calls_per_hour = 2"
    earlier = LATE - timedelta(hours=3)
    assert isinstance(await reserve(state, budget, earlier), Reservation)
    assert await reserve(state, budget, earlier) == BudgetLimit("calls_per_day", 3)
    assert isinstance(await reserve(state, budget, LATE + timedelta(minutes=30)), Reservation), "a new day"


async def test_tokens_are_estimated_first_and_corrected_afterwards(state: Bench) -> None:
    budget = CallBudget(BudgetSettings(tokens_per_day=100))
    reserved = await reserve(state, budget, LATE, 80)
    assert isinstance(reserved, Reservation)
    assert await reserve(state, budget, LATE, 30) == BudgetLimit("tokens_per_day", 100)
    async with state.processor.database.transaction() as tx:
        await budget.correct(tx, reserved, 15)
    assert await left(state, budget, LATE) == {"tokens_per_day": 85}
    async with state.processor.database.transaction() as tx:
        await budget.correct(tx, reserved, None)
    assert await left(state, budget, LATE) == {"tokens_per_day": 85}


async def test_without_limits_everything_is_allowed(state: Bench) -> None:
    budget = CallBudget(BudgetSettings())
    assert isinstance(await reserve(state, budget, LATE, 10**9), Reservation)
    assert await left(state, budget, LATE) == {}


async def test_nothing_is_allowed_where_the_limit_is_0(state: Bench) -> None:
    assert await reserve(state, CallBudget(BudgetSettings(calls_per_day=0)), LATE) == BudgetLimit("calls_per_day", 0)


async def test_old_periods_are_forgotten(state: Bench) -> None:
    budget = CallBudget(BudgetSettings(calls_per_day=1))
    await reserve(state, budget, START)
    async with state.processor.database.transaction() as tx:
        await budget.prune(tx, START + timedelta(days=1))
    assert await state.count("spending") == 2
    async with state.processor.database.transaction() as tx:
        await budget.prune(tx, START + timedelta(days=4))
    assert await state.count("spending") == 0


async def test_a_spent_budget_makes_the_judge_abstain_until_it_is_renewed(llm: FakeLLM, data_dir: Path) -> None:
    limited = settings(llm, budget={"calls_per_hour": 2}, endpoint={"concurrency": 1})
    async with judge(limited, data_dir) as rig:
        await rig.bench.deliver(*(trajectory(f"t{n}", answer=str(n)) for n in range(3)))
        rewards = await rig.judged(3)
        assert [reward.outcome for reward in rewards] == ["scored", "scored", "abstained"]
        assert rewards[2].reason == "the budget is spent: judge.budget.calls_per_hour = 2"
        await rig.restart()
        await rig.bench.deliver(trajectory("known", answer="0"), trajectory("new", answer="new"))
        outcomes = {reward.trajectory_id: reward.outcome for reward in await rig.judged(5)}
        assert (outcomes["known"], outcomes["new"]) == ("scored", "abstained"), "what is known costs nothing"
        rig.bench.clock.advance(3600)
        await rig.bench.deliver(trajectory("next hour", answer="later"))
        assert (await rig.judged(6))[-1].outcome == "scored"
    assert len(llm.calls) == 3


@pytest.mark.parametrize(
    ("trouble", "spent"),
    [
        (fake_llm.status(429), 120),  # refused before any work: only the second call's usage counts
        (fake_llm.status(400), 0),
        (fake_llm.say("prose", tokens=(7, 3)), 10 + 120),
    ],
    ids=["429", "400", "unreadable"],
)
async def test_tokens_are_counted_as_reported(
    llm: FakeLLM, data_dir: Path, trouble: fake_llm.Behaviour, spent: int
) -> None:
    llm.then(trouble)
    async with judge(settings(llm, budget={"tokens_per_day": 100_000}), data_dir) as rig:
        await rig.bench.deliver(trajectory("t1"))
        while not rig.rewards:
            await rig.idle()
            rig.bench.clock.advance(1.0)
        assert await left(rig.bench, CallBudget(BudgetSettings(tokens_per_day=0)), START) == {"tokens_per_day": -spent}


@pytest.mark.parametrize(
    ("trouble", "outcome"), [(fake_llm.hang(), "timed_out"), (fake_llm.drop(), "failed")], ids=["hang", "drop"]
)
async def test_a_call_that_may_have_been_billed_stays_counted(
    llm: FakeLLM, data_dir: Path, trouble: fake_llm.Behaviour, outcome: str
) -> None:
    llm.usual = trouble
    limited = settings(
        llm,
        budget={"tokens_per_day": 100_000},
        endpoint={"timeout_s": 0.2, "max_tokens": 500},
        retry={"timeouts_max": 1, "attempts_max": 1},
    )
    async with judge(limited, data_dir) as rig:
        await rig.bench.deliver(trajectory("t1"))
        (reward,) = await rig.judged()
        spent = -(await left(rig.bench, CallBudget(BudgetSettings(tokens_per_day=0)), START))["tokens_per_day"]
    assert reward.outcome == outcome
    assert 500 < spent < 3000


async def test_a_verdict_that_cannot_be_asked_for_again_is_a_parse_error(llm: FakeLLM, data_dir: Path) -> None:
    llm.usual = fake_llm.prose()
    async with judge(settings(llm, budget={"calls_per_day": 1}), data_dir) as rig:
        await rig.bench.deliver(trajectory("t1"))
        (reward,) = await rig.judged()
    assert reward.outcome == "parse_error"
