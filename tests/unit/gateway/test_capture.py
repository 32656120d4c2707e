"""P1: the end of a response comes after the turn is durable, and an absent bus delays no client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace_gateway.settings import CaptureSettings
from headrace_gateway.spool_file import scan
from headrace_schemas import Turn
from tests.support.fake_replica import FakeReplica
from tests.support.full_disk import full_error
from tests.support.gateway import gateway, until


def spooled(folder: Path) -> list[Turn]:
    """Return the events in the spool's file, read as another process would."""
    scanned = [
        scanned.event
        for path in sorted((folder / "spool").glob("*.spool"))
        for scanned in scan(path.read_bytes(), 0, "")
    ]
    return [Turn.from_json(event.value) for event in scanned if event is not None and event.topic == Turn.topic]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_the_end_of_a_response_waits_for_the_acknowledgement(tmp_path: Path, stream: bool) -> None:
    replica = FakeReplica()
    capture = CaptureSettings(bus_wait_s=30)
    async with replica.running(), gateway(tmp_path, replica, capture=capture) as served:
        await served.chat()
        served.bus.back.clear()
        calling = asyncio.create_task(served.chat(stream=stream))
        await until(lambda: len(replica.requests) == 2)
        await asyncio.sleep(0.15)
        assert not calling.done()
        served.bus.back.set()
        assert (await calling).status_code == 200
        assert len(served.turns) == 2


async def test_a_stream_shows_its_last_word_before_it_is_captured_and_done_only_after(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica, capture=CaptureSettings(bus_wait_s=30)) as served:
        await until(lambda: served.publisher.connected)
        served.bus.back.clear()
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True}
        async with served.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            async for line in lines:
                if '"finish_reason":"stop"' in line:
                    break
            rest = asyncio.create_task(_rest(lines))
            await asyncio.sleep(0.15)
            assert served.turns == []
            assert not rest.done()
            served.bus.back.set()
            assert "[DONE]" in await rest
            assert len(served.turns) == 1


async def _rest(lines: AsyncIterator[str]) -> str:
    """Return the rest of the stream up to and including its first event."""
    async for line in lines:
        if line:
            return line
    return ""


async def test_an_outage_fails_no_request_and_loses_no_turn(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        await served.chat("before")
        served.bus.back.clear()
        ids = []
        for number in range(12):
            answer = await served.chat(f"question {number}", headers={"X-Session-Id": "run"}, stream=number % 3 == 0)
            assert answer.status_code == 200
            ids.append(answer.headers["x-request-id"])
            assert spooled(tmp_path)[-1].turn_id == ids[-1], "on the disk before the client saw the end"
        assert served.bus.kept_waiting <= 2, "the first call, and the spool on its way to the bus"
        assert (await served.client.get("/health")).status_code == 200
        served.bus.back.set()
        await until(lambda: served.spool.events == 0)
        assert list(dict.fromkeys(turn.turn_id for turn in served.turns))[1:] == ids


async def test_with_the_spool_full_new_calls_are_refused_and_none_is_lost(tmp_path: Path) -> None:
    replica = FakeReplica()
    capture = CaptureSettings(bus_wait_s=0.01, spool_bytes_max=4096)
    async with replica.running(), gateway(tmp_path, replica, capture=capture) as served:
        served.bus.back.clear()
        answers = [await served.chat() for _ in range(12)]
        statuses = [answer.status_code for answer in answers]
        accepted = statuses.count(200)
        assert statuses == [200] * accepted + [503] * (12 - accepted)
        assert 0 < accepted < 12
        assert answers[-1].headers["retry-after"] == "5"
        assert "spool is full" in answers[-1].json()["error"]["message"]
        assert (await served.client.get("/health")).json()["checks"]["capture"] is False
        assert len(spooled(tmp_path)) == accepted
        served.bus.back.set()
        await until(lambda: served.spool.events == 0)
        assert (await served.chat()).status_code == 200
        assert len({turn.turn_id for turn in served.turns}) == accepted + 1


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_without_bus_and_disk_the_client_does_not_see_an_end(tmp_path: Path, stream: bool) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        served.bus.back.clear()
        await served.chat()
        with full_error(in_place=False):
            answer = await served.chat("refused", stream=stream)
        if stream:
            assert "[DONE]" not in answer.text
            assert '"not_recorded"' in answer.text
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_recorded")
            assert f"no space left on {tmp_path / 'spool'}" in answer.json()["error"]["message"]
        served.bus.back.set()
        await until(lambda: served.spool.events == 0)
        assert [turn.messages[0].text for turn in served.turns] == ["hello"], "what was refused does not come later"


async def test_a_full_disk_refuses_new_work_and_not_what_is_under_way(tmp_path: Path) -> None:
    replica = FakeReplica()
    capture = CaptureSettings(bus_wait_s=0.01, spool_reserve_bytes=1_048_576)
    async with replica.running(), gateway(tmp_path, replica, capture=capture) as served:
        served.bus.back.clear()
        with full_error():
            answers = [await served.chat(f"{number} " + "x" * 4000) for number in range(40)]
            accepted = [answer.status_code for answer in answers].count(200)
            assert 8 < accepted < 40, "what was allocated before holds these"
            assert {answer.status_code for answer in answers[accepted:]} == {503}
            assert "disk: no space left on" in answers[-1].json()["error"]["message"]
            health = (await served.client.get("/health")).json()
            assert "no space left" in health["reasons"]["capture"]
        await until(lambda: served.spool.trouble is None)
        assert (await served.chat()).status_code == 200
        served.bus.back.set()
        await until(lambda: served.spool.events == 0)
        assert len({turn.turn_id for turn in served.turns}) == accepted + 1
