"""A replica that hangs is distinguished from a slow one, and its calls go on elsewhere."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx2
import pytest

from headrace_gateway.settings import UpstreamSettings
from tests.support.fake_replica import LENGTH, VERSION, FakeReplica, Fault, Generation, text_of
from tests.support.gateway import Gateway, gateway, until

UPSTREAM = UpstreamSettings(hold_s=20, probe_timeout_s=0.1, stall_timeout_s=60)


@pytest.fixture(autouse=True)
def _short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_gateway.replica_watch.PROBE_AFTER_S", 0.2)


STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])


def same(answer: httpx2.Response, replica: FakeReplica, request: int = -1) -> bool:
    """Whether the client has every token, once."""
    expected = "".join(map(text_of, Generation(replica.requests[request], VERSION).tokens(0)))
    if answer.headers["content-type"].startswith("application/json"):
        return bool(answer.json()["choices"][0]["message"]["content"] == expected)
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
    texts = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    return "".join(texts) == expected and answer.text.endswith("data: [DONE]\n\n")


async def busy(served: Gateway, a: FakeReplica, b: FakeReplica) -> tuple[FakeReplica, FakeReplica]:
    """The replica that the session `x` is with, and the other one."""
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
        assert all(same(answer, second) for answer in answers)
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
        assert same(answer, first)
        assert second.requests == []


async def test_new_calls_avoid_it_until_it_answers_again(tmp_path: Path) -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    async with a.running(), b.running(), gateway(tmp_path, a, b, upstream=UPSTREAM) as served:
        first, second = await busy(served, a, b)
        first.moves.clear()
        await until(lambda: served.replica_set.hanging(), 10)  # nobody had to call it to find out
        served.beat(first)  # it was sent before it hung, and read late
        assert (await served.chat(headers={"X-Session-Id": "x"})).status_code == 200
        assert len(first.requests) == 1
        first.moves.set()
        await until(lambda: not served.replica_set.hanging(), 10)
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
        await until(lambda: served.replica_set.hanging(), 10)
        later = asyncio.create_task(served.chat("later", stream=stream))
        await until(lambda: replica.health_checks > 4, 10)
        replica.go_on.set()
        replica.moves.set()
        assert same(await asking, replica, 0)
        assert (await later).status_code == 200
        assert len(replica.requests) == 2, "nothing was asked twice"


async def test_a_twin_that_comes_later_takes_over(tmp_path: Path) -> None:
    a, b = FakeReplica("a", faults=[Fault(stall_after=2)]), FakeReplica("b")
    async with a.running(), b.running(), gateway(tmp_path, a, upstream=UPSTREAM) as served:
        asking = asyncio.create_task(served.chat(stream=True))
        await until(lambda: a.requests)
        a.moves.clear()
        await until(lambda: served.replica_set.hanging(), 10)
        served.beat(b)
        assert same(await asking, b)
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
        while not served.replica_set.hanging():
            with pytest.raises(httpx2.ReadTimeout):
                await served.client.post(
                    "/v1/chat/completions",
                    json={"model": "tiny", "messages": [{"role": "user", "content": "x"}]},
                    timeout=0.1,
                )
            assert len(replica.requests) < 100


async def test_a_hung_replica_without_the_version_of_a_begun_stream_is_waited_for(tmp_path: Path) -> None:
    """The twin has other weights: it may take new calls, and none that has tokens of the first."""
    other = "tiny@fedcba9876543210"
    a, b = FakeReplica("a", faults=[Fault(stall_after=2)]), FakeReplica("b", versions=(other,))
    async with a.running(), b.running(), gateway(tmp_path, a, b, upstream=UPSTREAM) as served:
        asking = asyncio.create_task(served.chat(stream=True))
        await until(lambda: a.requests)
        a.moves.clear()
        served.route(other, revision=2, serve=(VERSION, other))
        await until(lambda: served.replica_set.hanging(), 10)
        assert (await served.chat("new")).json()["model"] == other
        a.go_on.set()
        a.moves.set()
        assert same(await asking, a)
