"""Tests of the order of calls to a replica, and of hanging replicas.

Tenants are ordered by their calls in flight, sessions take turns, and evaluations wait for users. A replica that hangs
is distinguished from a slow replica, and its calls are resumed on another replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest

from headrace_gateway.requests.chat_call import ChatCall
from headrace_gateway.routing.dispatch import WINDOW, Dispatcher
from headrace_gateway.settings import LimitSettings, UpstreamSettings
from tests.support.fake_replica import LENGTH, VERSION, FakeReplica, Fault, Generation, text_of
from tests.support.gateway import Gateway, gateway, routing, until
from tests.support.presence import draw_seed

PLACES = 8


def call(tenant: str, session: str = "s", choices: int = 1, *, background: bool = False) -> ChatCall:
    identity = SimpleNamespace(tenant=tenant, session_key=session)
    request = SimpleNamespace(choices=choices)
    return cast(ChatCall, SimpleNamespace(identity=identity, request=request, is_background=background))


class Rig:
    """Calls to a replica that stay in flight until the test ends them."""

    def __init__(self, places: int = PLACES) -> None:
        self.dispatcher = Dispatcher(lambda: places)
        self.begun: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, name: str, wanted: ChatCall) -> None:
        self._ends[name] = asyncio.Event()

        async def run() -> None:
            async with self.dispatcher.admit(wanted):
                self.begun.append(name)
                await self._ends[name].wait()

        self.tasks[name] = asyncio.create_task(run())
        await self._settle()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self.tasks[name]
        await self._settle()

    async def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.wait(self.tasks.values())

    @staticmethod
    async def _settle() -> None:
        for _ in range(10):
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def rig(places: int = PLACES) -> AsyncIterator[Rig]:
    opened = Rig(places)
    yield opened
    await opened.close()
    assert (opened.dispatcher.waiting, sum(opened.dispatcher._in_flight.values())) == (0, 0)


async def test_a_tenant_that_fills_the_window_keeps_no_other_tenant_waiting() -> None:
    async with rig() as calls:
        for number in range(24):
            await calls.start(f"heavy {number}", call("heavy", f"s{number}", 4))
        assert len(calls.begun) <= 2 * WINDOW * PLACES // 4
        await calls.start("light", call("light"))
        assert calls.begun[-1] == "light"


async def test_a_place_that_becomes_free_goes_to_the_tenant_with_the_least_in_flight() -> None:
    async with rig() as calls:
        for number in range(WINDOW * PLACES):
            await calls.start(f"a{number}", call("a", f"s{number}"))
        for number in range(20):
            await calls.start(f"b{number}", call("b", f"s{number}"))
        begun = calls.begun.count
        assert sum(name.startswith("b") for name in calls.begun) == WINDOW * PLACES // 2
        await calls.start("a late", call("a", "late"))
        for number in range(PLACES):
            await calls.end(f"a{number}")
        assert begun("a late") == 0
        await calls.end("b0")
        assert calls.begun[-1].startswith("b")


async def test_the_sessions_of_a_tenant_take_turns() -> None:
    async with rig() as calls:
        await calls.start("first", call("only", "greedy", WINDOW * PLACES))
        for number in range(5):
            await calls.start(f"greedy {number}", call("only", "greedy", WINDOW * PLACES))
        await calls.start("modest", call("only", "modest"))
        assert calls.begun == ["first", "modest"], "what one session asks for keeps no other session waiting"


async def test_evaluations_get_what_users_leave_and_always_one_place() -> None:
    async with rig() as calls:
        for number in range(PLACES // 2):
            await calls.start(f"user {number}", call("acme", f"s{number}"))
        for number in range(200):
            await calls.start(f"play {number}", call("acme", f"p{number}", background=True))
        assert sum(name.startswith("play") for name in calls.begun) == 1
        await calls.start("late user", call("acme", "late"))
        assert calls.begun[-1] == "late user"
        for number in range(PLACES // 2):
            await calls.end(f"user {number}")
        await calls.end("late user")
        assert sum(name.startswith("play") for name in calls.begun) == WINDOW * PLACES
        await calls.start("user again", call("acme", "again"))
        assert calls.begun[-1] == "user again"


async def test_calls_that_leave_while_they_wait_take_nothing_along() -> None:
    seed = draw_seed()
    rng = random.Random(seed)
    async with rig() as calls:
        names = []
        for number in range(60):
            name = f"{number}"
            waiting_call = call(rng.choice("ab"), rng.choice("xyz"), rng.randint(1, 5), background=rng.random() < 0.3)
            await calls.start(name, waiting_call)
            names.append(name)
        for name in rng.sample(names, 40):
            calls.tasks[name].cancel()
            await asyncio.wait([calls.tasks[name]])
        while left := [name for name in names if not calls.tasks[name].done()]:
            (going, *_) = [name for name in left if name in calls.begun] or [""]
            assert going, f"SEED={seed}: nobody goes of {len(left)} that wait"
            await calls.end(going)
        assert calls.dispatcher.waiting == 0, f"SEED={seed}"


async def test_a_model_whose_replicas_are_busy_keeps_no_other_model_waiting(tmp_path: Path) -> None:
    busy = FakeReplica("busy", versions=("tiny@0123456789abcdef",), capacity=1)
    free = FakeReplica("free", versions=("other@0123456789abcdef",), capacity=1)
    async with busy.running(), free.running(), gateway(tmp_path, busy, free) as served:
        served.catalog.update("other", routing(free.versions[0]))
        busy.moves.clear()
        waiting = [asyncio.create_task(served.chat(headers={"X-Session-Id": "s"})) for _ in range(8)]
        await until(lambda: len(busy.requests) >= WINDOW)
        assert (await served.chat(model="other", headers={"X-Session-Id": "s"})).status_code == 200
        assert len(busy.requests) == WINDOW, "the others wait in the gateway"
        busy.moves.set()
        assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}


async def test_without_a_replica_calls_do_not_wait_here() -> None:
    async with rig(0) as calls:
        for number in range(50):
            await calls.start(f"{number}", call("a", choices=16))
        assert len(calls.begun) == 50


async def test_a_replica_learns_session_and_purpose_of_a_call(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        await served.chat(headers={"X-Session-Id": "run-1"})
        await served.chat(headers={"X-Session-Id": "run-1", "X-Headrace-Purpose": "eval"})
        first, second = replica.headers
        keys = [turn.session_key for turn in served.turns]
        assert [headers["x-headrace-session"] for headers in (first, second)] == keys
        assert "x-headrace-purpose" not in first
        assert second["x-headrace-purpose"] == "eval"


async def test_choices_and_tokens_are_charged_and_what_was_not_used_is_given_back(tmp_path: Path) -> None:
    replica = FakeReplica()
    limits = LimitSettings(tokens_per_s=0.001, tokens_burst=3000, burst=40, requests_per_s=0.001, concurrency=20)
    async with replica.running(), gateway(tmp_path, replica, limits_per_key=limits) as served:
        for _ in range(5):  # each may take 2000 tokens and takes about 100
            assert (await served.chat(max_tokens=1000, n=2)).status_code == 200
        codes: list[Any] = []
        for _ in range(3):
            answer = await served.chat(max_tokens=200, n=14)
            codes.append(answer.json().get("error", {}).get("code"))
        assert codes[0] in (None, "token_limit_exceeded")
        assert codes[-1] in ("rate_limit_exceeded", "token_limit_exceeded")


async def test_stored_bytes_have_a_bound_that_names_its_setting(tmp_path: Path) -> None:
    from headrace_gateway.settings import CaptureSettings

    capture = CaptureSettings(bus_wait_s=0.2, tenant_bytes_per_hour=1_048_576)
    async with gateway(tmp_path, capture=capture) as served:
        body = {"session_id": "s", "value": 1, "context": {"text": "x" * 400_000}}
        statuses = [(await served.client.post("/v1/feedback", json=body)).status_code for _ in range(4)]
        assert statuses == [202, 202, 202, 429]
        error = (await served.client.post("/v1/feedback", json=body)).json()["error"]
        assert error["code"] == "storage_limit_exceeded"
        assert "gateway.capture.tenant_bytes_per_hour" in error["message"]


UPSTREAM = UpstreamSettings(hold_s=20, probe_timeout_s=0.1, stall_timeout_s=60)


@pytest.fixture(autouse=True)
def _short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_gateway.routing.replica_set.PROBE_AFTER_S", 0.2)


STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])


def has_all_tokens_once(answer: httpx2.Response, replica: FakeReplica, request: int = -1) -> bool:
    """Return whether the client received each token of the replica's answer exactly once."""
    expected = "".join(map(text_of, Generation(replica.requests[request], VERSION).tokens(0)))
    if answer.headers["content-type"].startswith("application/json"):
        return bool(answer.json()["choices"][0]["message"]["content"] == expected)
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
    texts = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    return "".join(texts) == expected and answer.text.endswith("data: [DONE]\n\n")


async def busy(served: Gateway, a: FakeReplica, b: FakeReplica) -> tuple[FakeReplica, FakeReplica]:
    """Return the replica that serves the session `x`, and the other replica."""
    await served.chat(max_tokens=1, headers={"X-Session-Id": "x"})
    served.bus.records.clear()
    return (a, b) if a.requests else (b, a)


@STREAMS
async def test_calls_of_a_replica_that_hangs_go_on_at_its_twin(tmp_path: Path, stream: bool) -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    async with a.running(), b.running(), gateway(tmp_path, a, b, upstream=UPSTREAM) as served:
        first, second = await busy(served, a, b)
        first.faults = [Fault(stall_after=2) for _ in range(5)]
        asking = [asyncio.create_task(served.chat(stream=stream, headers={"X-Session-Id": "x"})) for _ in range(5)]
        await until(lambda: len(first.requests) == 6)
        first.moves.clear()
        answers = await asyncio.gather(*asking)
        assert {answer.status_code for answer in answers} == {200}
        assert all(has_all_tokens_once(answer, second) for answer in answers)
        assert len(second.requests) == 5
        assert {turn.replica_id for turn in served.turns} == {second.replica_id}
        assert len(served.turns) == 5
        assert all(len(turn.choices[0].token_ids) == LENGTH for turn in served.turns)
        await until(lambda: first.cancelled == 5)


@STREAMS
async def test_a_slow_replica_is_not_given_up(tmp_path: Path, stream: bool) -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    async with a.running(), b.running(), gateway(tmp_path, a, b, upstream=UPSTREAM) as served:
        first, second = await busy(served, a, b)
        first.faults = [Fault(stall_after=0)]  # a long prompt, say
        asking = asyncio.create_task(served.chat(stream=stream, headers={"X-Session-Id": "x"}))
        await until(lambda: first.health_checks >= 4)
        first.go_on.set()
        answer = await asking
        assert has_all_tokens_once(answer, first)
        assert second.requests == []


async def test_new_calls_avoid_it_until_it_answers_again(tmp_path: Path) -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    async with a.running(), b.running(), gateway(tmp_path, a, b, upstream=UPSTREAM) as served:
        first, second = await busy(served, a, b)
        first.moves.clear()
        await until(lambda: served.replica_set.hung_members(), 10)  # nobody had to call it to find out
        served.beat(first)  # it was sent before it hung, and read late
        assert (await served.chat(headers={"X-Session-Id": "x"})).status_code == 200
        assert len(first.requests) == 1
        first.moves.set()
        await until(lambda: not served.replica_set.hung_members(), 10)
        assert (await served.chat(headers={"X-Session-Id": "x"})).status_code == 200
        assert len(first.requests) == 2
        assert len(second.requests) == 1


@STREAMS
async def test_the_only_replica_is_held_on_to_and_answers_when_it_can(tmp_path: Path, stream: bool) -> None:
    replica = FakeReplica(faults=[Fault(stall_after=2)])
    async with replica.running(), gateway(tmp_path, replica, upstream=UPSTREAM) as served:
        asking = asyncio.create_task(served.chat(stream=stream))
        await until(lambda: replica.requests)
        replica.moves.clear()
        await until(lambda: served.replica_set.hung_members(), 10)
        later = asyncio.create_task(served.chat("later", stream=stream))
        await until(lambda: replica.health_checks > 4, 10)
        replica.go_on.set()
        replica.moves.set()
        assert has_all_tokens_once(await asking, replica, 0)
        assert (await later).status_code == 200
        assert len(replica.requests) == 2, "nothing was asked twice"


async def test_a_twin_that_comes_later_takes_over(tmp_path: Path) -> None:
    a, b = FakeReplica("a", faults=[Fault(stall_after=2)]), FakeReplica("b")
    async with a.running(), b.running(), gateway(tmp_path, a, upstream=UPSTREAM) as served:
        asking = asyncio.create_task(served.chat(stream=True))
        await until(lambda: a.requests)
        a.moves.clear()
        await until(lambda: served.replica_set.hung_members(), 10)
        served.beat(b)
        assert has_all_tokens_once(await asking, b)
        assert a.cancelled == 1


@STREAMS
async def test_hanging_alone_ends_with_the_hold(tmp_path: Path, stream: bool) -> None:
    upstream = UPSTREAM.model_copy(update={"hold_s": 0.5})
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica, upstream=upstream) as served:
        replica.moves.clear()
        answer = await served.chat(stream=stream)
        assert answer.status_code == 503
        assert "within 0.5 s: hung" in answer.json()["error"]["message"]


async def test_impatient_clients_do_not_hide_that_it_hangs(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica, upstream=UPSTREAM) as served:
        replica.moves.clear()
        while not served.replica_set.hung_members():
            with pytest.raises(httpx2.ReadTimeout):
                await served.client.post(
                    "/v1/chat/completions",
                    json={"model": "tiny", "messages": [{"role": "user", "content": "x"}]},
                    timeout=0.1,
                )
            assert len(replica.requests) < 100


async def test_a_hung_replica_without_the_version_of_a_begun_stream_is_waited_for(tmp_path: Path) -> None:
    """The other replica has another version: it may serve new calls, but cannot resume a stream of the first
    version."""
    other = "tiny@fedcba9876543210"
    a, b = FakeReplica("a", faults=[Fault(stall_after=2)]), FakeReplica("b", versions=(other,))
    async with a.running(), b.running(), gateway(tmp_path, a, b, upstream=UPSTREAM) as served:
        asking = asyncio.create_task(served.chat(stream=True))
        await until(lambda: a.requests)
        a.moves.clear()
        served.route(other, revision=2, serve=(VERSION, other))
        await until(lambda: served.replica_set.hung_members(), 10)
        assert (await served.chat("new")).json()["model"] == other
        a.go_on.set()
        a.moves.set()
        assert has_all_tokens_once(await asking, a)
