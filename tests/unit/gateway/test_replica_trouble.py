"""Tests that clients see no fault of a replica while another replica works (P8)."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from headrace_gateway.settings import UpstreamSettings
from headrace_schemas import DeadLetter, LoadedVersion
from tests.attack.inputs import mutate
from tests.support.fake_replica import LENGTH, VERSION, FakeReplica, Fault, Generation, text_of
from tests.support.gateway import Gateway, gateway, until
from tests.support.presence import draw_seed
from tests.support.processes import free_port

OTHER = "tiny@fedcba9876543210"
UPSTREAM = {"hold_s": 0.3, "routing_wait_s": 0.1, "stall_timeout_s": 0.2}


def content(answer: httpx2.Response) -> str:
    """Return the text that the client received, from a plain or a streamed response."""
    if answer.headers["content-type"].startswith("application/json"):
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text
    assert answer.text.endswith("data: [DONE]\n\n"), answer.text[-300:]
    events = chunks_of(answer)
    roles = [choice["delta"].get("role") for event in events for choice in event["choices"]]
    assert [role for role in roles if role] == ["assistant"], "the client must not see the stream begin twice"
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


def chunks_of(answer: httpx2.Response) -> list[Any]:
    """Return the chunks of a complete stream."""
    return [json.loads(event.removeprefix("data: ")) for event in answer.text.split("\n\n")[:-2]]


def expected(replica: FakeReplica) -> str:
    return "".join(map(text_of, Generation(replica.requests[-1], VERSION).tokens(0)))


def check_turn(served: Gateway, replica: FakeReplica) -> None:
    (turn,) = served.turns
    work = Generation(replica.requests[-1], VERSION)
    assert list(turn.choices[0].token_ids) == work.tokens(0)
    assert list(turn.prompt_token_ids) == work.prompt_ids
    assert turn.replica_id == replica.replica_id


FAULTS = [
    Fault(status=503), Fault(status=500), Fault(status=429), Fault(status=404), Fault(drop_after=0),
    Fault(drop_after=3), Fault(abort_after=2),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("fault", FAULTS, ids=["503", "500", "429", "404", "drop", "drop-late", "abort"])
async def test_another_replica_takes_over(tmp_path: Path, fault: Fault, stream: bool) -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    async with a.running(), b.running(), gateway(tmp_path, a, b) as served:
        await served.chat(max_tokens=1)
        first, second = (a, b) if a.requests else (b, a)
        served.bus.records.clear()
        first.faults = [fault]
        answer = await served.chat(stream=stream)
        assert answer.status_code == 200
        assert len(second.requests) == 1
        assert content(answer) == expected(second)
        check_turn(served, second)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("fault", [Fault(status=503), Fault(drop_after=2)], ids=["503", "drop"])
async def test_a_lonely_replica_is_waited_for(tmp_path: Path, fault: Fault, stream: bool) -> None:
    replica = FakeReplica(faults=[fault, fault])
    async with replica.running(), gateway(tmp_path, replica) as served:
        answer = await served.chat(stream=stream)
        assert answer.status_code == 200
        assert content(answer) == expected(replica)
        check_turn(served, replica)


async def test_a_stream_resumes_with_every_choice_and_every_token(tmp_path: Path) -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    async with a.running(), b.running(), gateway(tmp_path, a, b) as served:
        await served.chat(n=2)
        first, second = (a, b) if a.requests else (b, a)
        first.faults = [Fault(drop_after=5)]
        await served.chat(n=2, stream=True, stream_options={"include_usage": True})
        resume = second.requests[0]["headrace_resume"]
        assert [choice["index"] for choice in resume["choices"]] == [0, 1]
        undisturbed, resumed = served.turns
        assert resumed.choices == undisturbed.choices
        assert resumed.usage == undisturbed.usage


@pytest.mark.parametrize("drop_after", [0, 2], ids=["before-the-first-token", "between-tokens"])
async def test_a_replica_that_knows_another_prompt_goes_on_after_the_one_that_was_sampled_from(
    tmp_path: Path, drop_after: int
) -> None:
    """The prompt that was sampled from is sent with the resumed call, because only its replica remembers the tokens
    (P2)."""
    a, b = FakeReplica("a"), FakeReplica("b", prompt_tail=(7, 7))
    async with a.running(), b.running(), gateway(tmp_path, a, b) as served:
        await served.chat(max_tokens=1)
        first, second = (a, b) if a.requests else (b, a)
        served.bus.records.clear()
        first.faults = [Fault(drop_after=drop_after)]
        answer = await served.chat(stream=True, return_token_ids=True)
        assert content(answer) == expected(second)
        assert served.bus.events(DeadLetter) == []
        (turn,) = served.turns
        sampled = first if drop_after else second
        work = Generation(sampled.requests[-1], VERSION, sampled.prompt_tail)
        assert list(turn.prompt_token_ids) == work.prompt_ids
        prompts = [chunk["prompt_token_ids"] for chunk in chunks_of(answer) if "prompt_token_ids" in chunk]
        assert prompts == [work.prompt_ids], "the client is shown one prompt, that of the captured turn"


async def test_a_stream_moves_to_a_replica_that_drains_its_version(tmp_path: Path) -> None:
    """A version leaves routing during a stream and its replica fails; the other replicas still serve it for a while."""
    a, b = FakeReplica("a"), FakeReplica("b")
    async with a.running(), b.running(), gateway(tmp_path, a) as served:
        served.replica_set.update("b", b.heartbeat(versions=(LoadedVersion(version=VERSION, state="draining"),)))
        a.faults = [Fault(drop_after=3)]
        answer = await served.chat(stream=True)
        assert content(answer) == expected(b)
        check_turn(served, b)


@pytest.mark.parametrize(
    "announced", [(), (LoadedVersion(version=VERSION, state="loading"),)], ids=["nothing", "loading"]
)
async def test_a_stream_waits_for_its_replica_to_start_again(
    tmp_path: Path, announced: tuple[LoadedVersion, ...]
) -> None:
    replica = FakeReplica(faults=[Fault(drop_after=3)])
    replica.token_delay_s = 0.02
    async with replica.running(), gateway(tmp_path, replica) as served:
        member = served.replica_set.pick(VERSION, "")
        assert member is not None
        waiting = asyncio.create_task(served.chat(stream=True))
        await until(lambda: member.in_flight == 1)
        served.replica_set.update(replica.replica_id, replica.heartbeat(versions=announced))
        await until(lambda: member.in_flight == 0)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        served.beat(replica)
        assert content(await waiting) == expected(replica)
        check_turn(served, replica)


async def test_a_stalled_stream_moves_on(tmp_path: Path) -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    async with a.running(), b.running(), gateway(tmp_path, a, b, upstream=UPSTREAM) as served:
        await served.chat(max_tokens=1)
        first, second = (a, b) if a.requests else (b, a)
        served.bus.records.clear()
        first.faults = [Fault(stall_after=2)]
        answer = await served.chat(stream=True)
        assert content(answer) == expected(second)
        await until(lambda: first.cancelled == 1)


async def test_a_replica_that_comes_back_serves_what_waited(tmp_path: Path) -> None:
    replica, port = FakeReplica(), free_port()
    async with gateway(tmp_path) as served:
        served.route(VERSION)
        replica.url = f"http://127.0.0.1:{port}"
        served.beat(replica)
        waiting = [asyncio.create_task(served.chat(f"question {n}", stream=n % 2 == 0)) for n in range(10)]
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in waiting)
        async with replica.running(port):
            answers = await asyncio.gather(*waiting)
    assert {answer.status_code for answer in answers} == {200}


async def test_a_swap_of_weights_fails_nobody(tmp_path: Path) -> None:
    """Pitfall 28: a change of weights never causes a 429 or 503."""
    replica = FakeReplica(versions=(VERSION, OTHER))
    replica.token_delay_s = 0.005
    stop = False
    statuses: list[int] = []

    async with replica.running(), gateway(tmp_path, replica) as served:

        async def agent(name: int) -> None:
            number = 0
            while not stop:
                number += 1
                headers = {"X-Session-Id": f"{name}-{number // 3}"}
                statuses.append((await served.chat(stream=number % 2 == 0, headers=headers)).status_code)

        async def more(answers: int) -> None:
            enough = len(statuses) + answers
            await until(lambda: len(statuses) >= enough, 20)

        agents = [asyncio.create_task(agent(name)) for name in range(4)]
        for revision in range(2, 12):
            champion, old = (OTHER, VERSION) if revision % 2 == 0 else (VERSION, OTHER)
            served.route(champion, revision=revision, serve=(VERSION, OTHER))
            await more(4)
            served.route(champion, revision=revision, withdrawn=(old,))
            replica.versions = (champion,)
            served.beat(replica)
            await more(4)
            replica.versions = (VERSION, OTHER)
            served.beat(replica)
        stop = True
        await asyncio.gather(*agents)
        assert set(statuses) == {200}
        assert {turn.version for turn in served.turns} == {VERSION, OTHER}
        assert len(served.turns) == len(statuses)


async def test_when_nobody_can_serve_the_hold_is_bounded(tmp_path: Path) -> None:
    async with gateway(tmp_path, upstream=UPSTREAM) as served:
        served.route(VERSION)
        started = time.monotonic()
        answer = await served.chat()
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"
        assert "no replica has the version ready" in answer.json()["error"]["message"]
        assert time.monotonic() - started < 5
        assert (await served.chat(stream=True)).status_code == 503


async def test_a_model_without_a_champion_waits_for_one(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        served.route(None, revision=2)
        waiting = asyncio.create_task(served.chat())
        await asyncio.sleep(0.1)
        served.route(VERSION, revision=3)
        assert (await waiting).status_code == 200


async def test_before_the_routing_is_known_a_request_waits_and_then_is_told_when_to_come_back(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, upstream=UPSTREAM) as served:
        answer = await served.chat()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert (await served.client.get("/health")).status_code == 503
        waiting = asyncio.create_task(served.chat())
        await asyncio.sleep(0.02)
        served.route(VERSION)
        served.beat(replica)
        assert (await waiting).status_code == 200


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_a_request_that_breaks_every_engine_fails_after_a_few(tmp_path: Path, stream: bool) -> None:
    a, b = FakeReplica("a", faults=[Fault(status=500)] * 9), FakeReplica("b", faults=[Fault(status=500)] * 9)
    async with a.running(), b.running(), gateway(tmp_path, a, b) as served:
        answer = await served.chat(stream=stream)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_error")
        assert a.requests
        assert b.requests
        assert len(a.requests) + len(b.requests) == 3
        a.faults, b.faults = [], []
        assert (await served.chat()).status_code == 200, "one bad request must not cost the others their replicas"


@pytest.mark.parametrize(
    ("status", "message", "code"),
    [
        (400, "This model's maximum context length is 40 tokens.", "context_length_exceeded"),
        (400, "the template refuses two system messages", "invalid_request"),
        (422, "no", "invalid_request"),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_what_the_engine_refuses_the_client_is_told(
    tmp_path: Path, status: int, message: str, code: str, stream: bool
) -> None:
    replica = FakeReplica(faults=[Fault(status=status, message=message)])
    async with replica.running(), gateway(tmp_path, replica) as served:
        answer = await served.chat(stream=stream)
        assert answer.status_code == status
        assert answer.json()["error"] == {
            "message": message,
            "type": "invalid_request_error",
            "param": None,
            "code": code,
        }
        assert len(replica.requests) == 1


async def test_a_broken_stream_that_nobody_can_take_over_ends_with_an_error_and_without_done(tmp_path: Path) -> None:
    replica = FakeReplica(engine="vllm", resumes=False, faults=[Fault(drop_after=2)])
    async with replica.running(), gateway(tmp_path, replica) as served:
        answer = await served.chat(stream=True)
        assert answer.status_code == 200
        last = json.loads(answer.text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["code"] == "overloaded"
        assert "[DONE]" not in answer.text
        assert served.turns == []


async def test_a_stream_cut_after_its_last_token_is_complete(tmp_path: Path) -> None:
    replica = FakeReplica(engine="vllm", resumes=False, faults=[Fault(no_usage=True)])
    async with replica.running(), gateway(tmp_path, replica) as served:
        replica.faults = [Fault(no_usage=True, drop_after=LENGTH)]
        answer = await served.chat(stream=True)
        assert content(answer) == expected(replica)


async def test_one_request_may_not_take_for_ever(tmp_path: Path) -> None:
    upstream = UpstreamSettings.model_validate({**UPSTREAM, "request_timeout_s": 0.2, "stall_timeout_s": 60})
    replica = FakeReplica(faults=[Fault(stall_after=0), Fault(stall_after=2)])
    async with replica.running(), gateway(tmp_path, replica, upstream=upstream) as served:
        answer = await served.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        assert '"code": "timeout"' in (await served.chat(stream=True)).text
        await until(lambda: replica.cancelled == 2)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(
    "fault", [Fault(lose_logprobs=1), Fault(usage_off_by=-1), Fault(no_usage=True)], ids=["logprobs", "usage", "none"]
)
async def test_tokens_that_cannot_be_true_are_dead_lettered_and_the_client_still_answered(
    tmp_path: Path, fault: Fault, stream: bool
) -> None:
    """P2, pitfalls 2 and 3: no token list is padded or truncated to fit."""
    replica = FakeReplica(faults=[fault])
    async with replica.running(), gateway(tmp_path, replica) as served:
        answer = await served.chat(stream=stream)
        assert content(answer) == expected(replica)
        assert served.turns == []
        (letter,) = served.bus.events(DeadLetter)
        assert (letter.service, letter.source_topic, letter.reason) == ("gateway", "turns", "token_mismatch")
        raw: dict[str, Any] = json.loads(letter.value)
        assert raw["turn_id"] == letter.source_id
        assert raw["choices"]["0"]["token_ids"] == Generation(replica.requests[0], VERSION).tokens(0)
        assert len(raw["choices"]["0"]["logprobs"]) == LENGTH - fault.lose_logprobs


async def test_a_version_that_is_none_is_dead_lettered(tmp_path: Path) -> None:
    replica = FakeReplica(faults=[Fault(model="served-model-name")])
    async with replica.running(), gateway(tmp_path, replica) as served:
        assert (await served.chat()).status_code == 200
        (letter,) = served.bus.events(DeadLetter)
        assert letter.reason == "invalid_turn"
        assert letter.error.startswith("version: ")


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("status", [200, 400], ids=["answers", "errors"])
async def test_no_answer_of_an_engine_is_an_error_of_the_gateway(tmp_path: Path, status: int, stream: bool) -> None:
    rng = random.Random(draw_seed())
    deep = [b"[" * 100_000, b'{"error": ' * 50_000, b"1" * 5000, b"\xff\xfe", b"null", b"[]", b'"text"', b""]

    def altered(document: dict[str, Any]) -> bytes:
        return rng.choice(deep) if rng.random() < 0.2 else mutate(document, rng).replace(b"\n", b"")

    replica = FakeReplica()
    quick = UpstreamSettings(hold_s=0.01, routing_wait_s=0.01, stall_timeout_s=0.2)
    async with replica.running(), gateway(tmp_path, replica, upstream=quick) as served:
        for _ in range(100):
            replica.faults = [Fault(status=status, altered=altered)]
            answer = await served.chat(stream=stream, max_tokens=3)
            assert answer.status_code in (200, 400, 502, 503), answer.text
            served.beat(replica)
        replica.faults = []
        assert content(await served.chat(stream=stream)) == expected(replica)


async def test_an_error_of_an_engine_with_a_lone_surrogate_is_a_refusal(tmp_path: Path) -> None:
    def altered(document: dict[str, Any]) -> bytes:
        document["error"] |= {"message": "m\ud800", "param": "p\udfff"}
        return json.dumps(document).encode()

    replica = FakeReplica(faults=[Fault(status=400, altered=altered)] * 2)
    async with replica.running(), gateway(tmp_path, replica) as served:
        assert (await served.chat()).status_code == 400
        body = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}
        assert (await served.client.post("/v1/messages", json=body)).status_code == 400
