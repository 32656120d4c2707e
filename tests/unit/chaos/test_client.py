"""Tests of the chaos tests' own tools: failed requests, the fault schedule, and wrong clocks.

The client's definition of a failed request is tested against a scripted gateway. The schedule of faults depends on the
seed alone and hits every process. A wrong clock changes only the wall clock of its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.chaos.balancer import Balancer
from tests.chaos.client import Client, ClientLedger, digest
from tests.chaos.nemeses import BUS, NEMESES, PAIRS, plan, services_on, victims_on
from tests.support import machine

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
WANDERS, KEEPS = "roams", "keeps"
"""A session that goes to the gateways in turn, and one that keeps to the second."""
WHOLE = {"id": "chatcmpl-1", "choices": [{"index": 0, "message": {"role": "assistant", "content": "Ada"}}]}
CHUNKS = [{"id": "chatcmpl-2", "choices": [{"index": 0, "delta": {"content": part}}]} for part in ("A", "da")]


async def plain(_request: web.Request) -> web.StreamResponse:
    return web.json_response(WHOLE)


async def refusing(_request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "the spool is full"}}, status=503)


def streaming(*last: str, cut: bool = False) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in (*map(json.dumps, CHUNKS), *last):
            await response.write(f"data: {event}\n\n".encode())
        if cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    return answer


class Rig:
    """A client behind a balancer over two gateways. Its first request goes to the first gateway."""

    def __init__(self, http: aiohttp.ClientSession, urls: list[str]) -> None:
        self.urls = urls
        self.ledger = ClientLedger()
        self.balancer = Balancer(http, urls)
        self._client = Client(http, self.balancer, self.ledger, "m")

    async def ask(self, session_id: str = WANDERS) -> str | None:
        async with asyncio.timeout(10):
            return await self._client.ask(session_id, [{"role": "user", "content": "who?"}])


@contextlib.asynccontextmanager
async def rig(first: Answer, second: Answer = plain) -> AsyncIterator[Rig]:
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for answer in (first, second):
            app = web.Application()
            app.router.add_post("/v1/chat/completions", answer)
            app.router.add_get("/health", plain)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        yield Rig(await stack.enter_async_context(aiohttp.ClientSession()), urls)


@pytest.mark.parametrize(
    ("answer", "name"), [(plain, "chatcmpl-1"), (streaming("[DONE]"), "chatcmpl-2")], ids=["plain", "stream"]
)
async def test_a_whole_answer_is_acked(answer: Answer, name: str) -> None:
    async with rig(answer) as world:
        assert await world.ask() == "Ada"
        assert world.ledger.acked[name].content == digest("Ada")
        assert (world.ledger.failures, world.ledger.retried) == ([], 0)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (refusing, "status 503"),
        (streaming(), "stream without its end"),
        (streaming('{"error": {"message": "gone"}}'), "stream without its end"),
        (streaming(cut=True), "connection lost"),
    ],
    ids=["refused", "no end", "error event", "cut"],
)
async def test_anything_less_is_a_failed_request(answer: Answer, kind: str) -> None:
    async with rig(answer) as world:
        assert await world.ask() is None
        assert world.ledger.failed_by == {kind: 1}
        assert world.ledger.acked == {}


async def test_a_connection_that_died_with_its_gateway_is_made_again_at_the_other() -> None:
    async with rig(streaming(cut=True)) as world:
        world.balancer.killing(world.urls[0])
        assert await world.ask() == "Ada"
        assert (world.ledger.failures, world.ledger.retried) == ([], 1)


async def test_one_that_is_on_its_way_back_may_say_so() -> None:
    async with rig(refusing) as world:
        world.balancer.killing(world.urls[0])
        assert await world.ask() == "Ada"
        assert (world.ledger.failures, world.ledger.refused) == ([], 1)


async def test_a_session_keeps_to_one_gateway_or_wanders_and_the_ledger_knows_where_it_was() -> None:
    async with rig(plain) as world:
        for _ in range(3):
            assert await world.ask(KEEPS) == "Ada"
            assert await world.ask(WANDERS) == "Ada"
        assert world.ledger.reached == {KEEPS: {world.urls[1]}, WANDERS: set(world.urls)}


async def test_who_lost_an_answer_may_have_recorded_it_and_who_refused_has_not() -> None:
    for answer, reached in ((streaming(cut=True), 2), (refusing, 1)):
        async with rig(answer) as world:
            world.balancer.killing(world.urls[0])
            assert await world.ask() == "Ada"
            assert len(world.ledger.reached[WANDERS]) == reached


async def test_an_old_kill_excuses_nothing() -> None:
    async with rig(plain) as world:
        killed, spared = world.urls
        before = time.monotonic()
        world.balancer.killing(killed)
        assert world.balancer.was_down(killed, before)
        assert not world.balancer.was_down(spared, before)
        checking = asyncio.create_task(world.balancer.run())
        async with asyncio.timeout(10):
            while world.balancer.was_down(killed, time.monotonic()):  # noqa: ASYNC110 (it has no event for this)
                await asyncio.sleep(0.01)
        checking.cancel()
        assert world.balancer.was_down(killed, before), "who asked before it was back may have met its death"


ALL = [("kill", name) for name in victims_on("embedded")]


def pairs(bus: str) -> list[tuple[str, str]]:
    return [(name, victim) for name, nemesis in NEMESES.items() for victim in nemesis.victims(bus)]


def test_equal_seeds_give_equal_schedules() -> None:
    assert plan(7, 50, ALL, 3.0) == plan(7, 50, ALL, 3.0)
    assert plan(7, 50, ALL, 3.0) != plan(8, 50, ALL, 3.0)


def test_a_shorter_run_is_the_beginning_of_a_longer_one() -> None:
    assert plan(7, 50, ALL, 3.0)[:9] == plan(7, 9, ALL, 3.0)


@pytest.mark.parametrize("bus", BUS)
def test_every_service_and_the_bus_are_hit_alike(bus: str) -> None:
    hit = Counter((strike.nemesis, strike.victim) for strike in plan(7, 200, pairs(bus), 3.0))
    assert set(hit) == set(pairs(bus))
    assert max(hit.values()) - min(hit.values()) <= 1
    installed = {"gateway", "inference", "collector", "scorer", "judge", "trainer", "registry"}
    assert installed <= set(services_on(bus))
    assert set(victims_on(bus)) - set(services_on(bus)) == {"broker" if bus == "embedded" else "kafka"}


def test_a_second_of_each_stream_service_runs_where_the_database_is_a_server() -> None:
    assert {"collector-2", "scorer-2", "judge-2"} <= set(services_on("kafka"))
    assert not {"collector-2", "scorer-2", "judge-2"} & set(services_on("embedded"))


def test_pauses_are_bounded_and_often_shorter_than_a_restart() -> None:
    pauses = [strike.pause_s for strike in plan(7, 400, ALL, 3.0)]
    assert max(pauses) <= 12.0
    assert 2.5 < sum(pauses) / len(pauses) < 3.3
    assert sum(pause < 1.0 for pause in pauses) > 80, "several are down together"


def test_pairs_stand_in_for_each_other() -> None:
    assert all(PAIRS[PAIRS[name]] == name != PAIRS[name] for name in PAIRS)


PROGRAM = """
import asyncio, datetime, sys, threading, time
for line in sys.stdin:
    began = time.monotonic()
    time.sleep(0.01)
    threading.Event().wait(0.01)
    asyncio.run(asyncio.sleep(0.01))
    assert 0.03 <= time.monotonic() - began < 60
    print(time.time(), time.time_ns() / 1e9, datetime.datetime.now(datetime.UTC).timestamp(), flush=True)
"""


@pytest.mark.skipif(machine.missing_compiler() is not None, reason="needs a C compiler")
def test_steps_in_both_directions(tmp_path: Path) -> None:
    file = tmp_path / "clock"
    environ = machine.clock_environ(tmp_path, file)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    ) as process:
        for by_s in (0.0, 1000.0, -1000.0, 0.0):
            machine.step_clock(file, by_s)
            assert process.stdin
            assert process.stdout
            process.stdin.write("\n")
            process.stdin.flush()
            true = time.time()
            assert [float(shown_time) - true for shown_time in process.stdout.readline().split()] == pytest.approx(
                [by_s] * 3, abs=60
            )
        assert process.stdin
        process.stdin.close()
