"""SIGSTOP of one of two replicas, then of the bus, under plain and streamed load: calls and streams must go on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from headrace_runtime.errors import Unavailable
from headrace_schemas import Turn
from tests.support.fake_replica import VERSION, FakeReplica, Generation, text_of
from tests.support.gateway import routing
from tests.support.processes import free_port, wait_open
from tests.support.servers import BrokerProcess
from tests.support.service_process import BusView, GatewayProcess, bus_view, wait_healthy
from tests.system.program import Line, at_most, none_of

TITLE = "a replica that is stopped, not dead, and a bus that is"
AGENTS = 8
ROUNDS = 2
STOPPED_S = 20.0
"""Duration of a SIGSTOP: longer than any call may take, so that a call that waits for the process to resume is
detected.
"""
RUNNING_S = 4.0
BEAT_S = 0.5
SLOWEST_S = 15.0
_TOKEN_S = 0.05
_PATIENCE_S = 120.0


@dataclass
class Load:
    """Observations of the agents."""

    calls: int = 0
    failures: list[str] = field(default_factory=list)
    wrong: int = 0
    slowest_s: float = 0.0
    delivered: set[str] = field(default_factory=set)


async def attack(folder: Path, rng: random.Random) -> list[Line]:
    broker = BrokerProcess(folder / "broker")
    await asyncio.to_thread(broker.start)
    gateway = GatewayProcess(folder / "data", broker.address)
    replicas = {f"replica-{name}": free_port() for name in "ab"}
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(broker.stop)
        pids = {name: stack.enter_context(_replica(name, port)) for name, port in replicas.items()}
        for port in replicas.values():
            await asyncio.to_thread(wait_open, port, 20)
        view = await stack.enter_async_context(bus_view(broker.address, folder / "data"))
        stack.callback(gateway.stop)
        await view.producer.send(routing(VERSION))
        silent: set[str] = set()
        await stack.enter_async_context(_beating(view, replicas, silent))
        await asyncio.to_thread(gateway.start)
        await asyncio.to_thread(wait_healthy, gateway.url)
        load, bus_load = Load(), Load()
        async with _agents(gateway.url, load):
            await asyncio.sleep(RUNNING_S)
            calm = await _failures(gateway.url)
            for _ in range(ROUNDS):
                await _stop_one(pids, silent, rng)
                await asyncio.sleep(RUNNING_S)
        async with _agents(gateway.url, bus_load):
            await asyncio.sleep(RUNNING_S)
            with _stopped(broker.pid):
                await asyncio.sleep(STOPPED_S)
        lost = await _lost(view, load.delivered | bus_load.delivered)
    return [
        none_of("replicas given up while all of them ran", calm, load.calls),
        *_lines("a stopped replica", load),
        *_lines("a stopped bus", bus_load),
        none_of("answered calls without their turn", lost, len(load.delivered | bus_load.delivered)),
    ]


def _lines(name: str, load: Load) -> list[Line]:
    for failure in load.failures[:3]:
        print(f"    {name}: {failure[:300]}")
    return [
        none_of(f"{name}: failed calls", len(load.failures), load.calls),
        none_of(f"{name}: answers with other tokens", load.wrong, load.calls),
        at_most(f"{name}: slowest call", round(load.slowest_s, 1), SLOWEST_S, " s"),
    ]


async def _stop_one(pids: dict[str, int], silent: set[str], rng: random.Random) -> None:
    """Stop one replica with SIGSTOP for `STOPPED_S`.

    In half of the cases its heartbeats end, too; otherwise they go on, as if only the network to the replica were cut.
    """
    name = rng.choice(sorted(pids))
    if rng.random() < 0.5:
        silent.add(name)
    with _stopped(pids[name]):
        await asyncio.sleep(STOPPED_S)
    silent.discard(name)


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def _replica(name: str, port: int) -> Iterator[int]:
    command = [sys.executable, "-m", "tests.support.fake_replica", name, str(port), VERSION, str(_TOKEN_S)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:  # it tells of each caller that left
        try:
            yield process.pid
        finally:
            process.kill()


@contextlib.asynccontextmanager
async def _beating(view: BusView, replicas: dict[str, int], silent: set[str]) -> AsyncIterator[None]:
    fakes = [FakeReplica(name, url=f"http://127.0.0.1:{port}") for name, port in replicas.items()]

    async def beat() -> None:
        while True:
            for fake in fakes:
                if fake.replica_id not in silent:
                    with contextlib.suppress(Unavailable):  # the bus is stopped; the next one says the same
                        await view.producer.send(fake.heartbeat())
            await asyncio.sleep(BEAT_S)

    async with _while_running(beat()):
        yield


@contextlib.asynccontextmanager
async def _agents(url: str, load: Load) -> AsyncIterator[None]:
    """Send calls until the block ends, then wait for the open calls."""
    stop = asyncio.Event()

    async def agent(number: int) -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=_PATIENCE_S) as client:
            turn = 0
            while not stop.is_set():
                turn += 1
                await _call(client, f"{url} {number} {turn} {id(load)}", stream=turn % 2 == 0, load=load)

    async with asyncio.TaskGroup() as group:
        for number in range(AGENTS):
            group.create_task(agent(number))
        try:
            yield
        finally:
            stop.set()


async def _call(client: httpx2.AsyncClient, text: str, *, stream: bool, load: Load) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "stream": stream}
    began = time.monotonic()
    load.calls += 1
    try:
        answer = await client.post("/v1/chat/completions", json=body)
    except httpx2.HTTPError as error:
        load.failures.append(repr(error))
        return
    finally:
        load.slowest_s = max(load.slowest_s, time.monotonic() - began)
    if answer.status_code != 200 or (stream and not answer.text.endswith("data: [DONE]\n\n")):
        load.failures.append(f"{answer.status_code} {answer.text[-500:]}")
        return
    load.delivered.add(answer.headers["x-request-id"])
    expected = "".join(map(text_of, Generation(body, VERSION).tokens(0)))
    load.wrong += answer_text(answer.text, stream=stream) != expected


def answer_text(text: str, *, stream: bool) -> str:
    if not stream:
        return str(json.loads(text)["choices"][0]["message"]["content"])
    events = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


async def _lost(view: BusView, delivered: set[str]) -> int:
    """Return the number of answered calls whose turn is not on the bus after the spool had time to drain."""
    deadline = time.monotonic() + 30
    while True:
        missing = delivered - {turn.turn_id for turn in await view.read(Turn)}
        if not missing or time.monotonic() > deadline:
            return len(missing)
        await asyncio.sleep(0.5)


async def _failures(url: str) -> int:
    async with httpx2.AsyncClient() as client:
        lines = (await client.get(f"{url}/metrics")).text.splitlines()
    name = "headrace_gateway_upstream_failures_total{"
    return round(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)))


@contextlib.asynccontextmanager
async def _while_running(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
