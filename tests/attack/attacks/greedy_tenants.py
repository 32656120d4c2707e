"""Tenants that take more than their share: one request that becomes many events, and unlimited load."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import httpx2
from aiokafka import ConsumerRecord

from headrace_runtime.settings.sections import BusSettings
from tests.attack.program import attack
from tests.attack.stacks import MODEL, Serving, serving
from tests.support.hostile_json import SESSIONS, feedback_body
from tests.support.servers import BrokerProcess
from tests.support.service_process import GatewayProcess, read_topic
from tests.system.program import Line, at_most, none_of

_SPOOL_BYTES_MAX = 2_000_000
_WINDOW_S = 5.0
_WINDOWS = 6
_REQUESTS = 20
_GROWTH_MAX = 10.0
_FILL_MAX = 400
_JSON = {"content-type": "application/json"}


@attack("one request becomes many events")
async def amplification(folder: Path, rng: random.Random) -> list[Line]:
    """Send feedback requests that become many events; measure the bytes on the bus and the effect on another tenant."""
    broker = BrokerProcess(folder / "bus")
    broker.start()
    gateway = GatewayProcess(folder / "gateway", broker.address, **_settings(folder))
    try:
        await asyncio.to_thread(gateway.start)
        async with _client(gateway.url, "hostile") as hostile, _client(gateway.url, "victim") as victim:
            await _bus_is_there(victim)
            lines = [await _largest(broker.address, hostile, rng)]
            lines += [
                await _grown(broker.address, hostile, context_characters) for context_characters in (0, 400, 4000)
            ]
            lines.append(await _harm(gateway.url, victim))
            await asyncio.sleep(3)
            await asyncio.to_thread(broker.kill)
            return lines + await _without_a_bus(folder / "gateway" / "gateway" / "spool", hostile, victim)
    finally:
        await asyncio.to_thread(gateway.stop)
        await asyncio.to_thread(broker.stop)


def _settings(folder: Path) -> dict[str, object]:
    keys = folder / "keys.toml"
    keys.write_text("\n".join(_key(name) for name in ("hostile", "victim")), encoding="utf-8")
    return {"GATEWAY__KEYS_FILE": keys, "GATEWAY__CAPTURE__SPOOL_BYTES_MAX": _SPOOL_BYTES_MAX}


def _key(name: str) -> str:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f'[[keys]]\nname = "{name}"\nsha256 = "{digest}"\ntenant = "{name}"\nscopes = ["feedback"]\n'


@contextlib.asynccontextmanager
async def _client(url: str, key: str) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60) as client:
        yield client


async def _bus_is_there(client: httpx2.AsyncClient) -> None:
    """Wait until the gateway sends feedback to the bus. Raises `TimeoutError`."""
    async with asyncio.timeout(60):
        while not _count(await _metrics(client), "bus"):
            await client.post("/v1/feedback", json={"session_id": "first", "value": 1})
            await asyncio.sleep(0.2)


async def _metrics(client: httpx2.AsyncClient) -> str:
    return (await client.get("/metrics")).text


def _count(metrics: str, where: str) -> float:
    samples = [line for line in metrics.splitlines() if line.startswith("headrace_gateway_published") and where in line]
    return sum(float(line.split()[-1]) for line in samples if "_created" not in line)


async def _largest(bus: str, hostile: httpx2.AsyncClient, rng: random.Random) -> Line:
    """Send the feedback that once became 1.9 GB on the bus: 4,000 response ids, each in all of 4,000 sessions."""
    sent = json.dumps(feedback_body("hostile", 4000)).encode()
    before = await _bytes_on(bus)
    answer = await hostile.post("/v1/feedback", content=sent, headers=_JSON)
    grown = (await _bytes_on(bus) - before) / len(sent)
    name = f"4,000 ids over 4,000 sessions (answered {answer.status_code}): bytes on the bus for one of the request"
    return at_most(name, round(grown, 2), _GROWTH_MAX)


async def _grown(bus: str, hostile: httpx2.AsyncClient, context_characters: int) -> Line:
    """Send feedback about as many sessions as the gateway allows, with a context of `context_characters`."""
    before, sent, sessions = await _bytes_on(bus), 0, SESSIONS
    for _ in range(_REQUESTS):
        while True:
            payload = json.dumps(
                feedback_body("hostile", sessions) | {"context": {"expected": "x" * context_characters}}
            ).encode()
            answer = await hostile.post("/v1/feedback", content=payload, headers=_JSON)
            if answer.status_code == 413:
                sessions -= max(1, sessions // 8)
            elif answer.status_code == 429:
                await asyncio.sleep(0.2)
            else:
                break
        assert answer.status_code == 202, answer.text
        sent += len(payload)
    grown = (await _bytes_on(bus) - before) / sent
    return at_most(
        f"{sessions} sessions, {context_characters} bytes of context: bytes on the bus for one",
        round(grown, 2),
        _GROWTH_MAX,
    )


async def _bytes_on(bus: str) -> int:
    """Return the bytes of keys, values and headers of all records on the topic `feedback`."""
    return sum(_size(message) for message in await read_topic(BusSettings(address=bus), "feedback"))


def _size(message: ConsumerRecord) -> int:
    headers = sum(len(name) + len(value) + 2 for name, value in message.headers)
    return len(message.key or b"") + len(message.value or b"") + headers + 10


async def _harm(url: str, victim: httpx2.AsyncClient) -> Line:
    """Compare the 99th percentile of the other tenant's latency in quiet periods and under attack, which alternate."""
    calm: list[float] = []
    attacked: list[float] = []
    await _waits(victim)
    for _ in range(_WINDOWS):
        calm += await _waits(victim)
        with _hostile(url):
            await asyncio.sleep(2)
            attacked += await _waits(victim)
    worse = _p99(attacked) / _p99(calm)
    name = f"the other tenant's p99, {_p99(calm) * 1000:.0f} ms when calm, {_p99(attacked) * 1000:.0f} ms under attack"
    return Line(name, f"{worse:.2f}x", "less than 2x", worse < 2)


@contextlib.contextmanager
def _hostile(url: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-m", "tests.support.hostile_json", url, "hostile"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def _waits(victim: httpx2.AsyncClient) -> list[float]:
    waits = []
    end = time.monotonic() + _WINDOW_S
    while time.monotonic() < end:
        began = time.monotonic()
        answer = await victim.post("/v1/feedback", json={"session_id": "mine", "msg_ids": ["a"], "value": 1})
        waits.append(time.monotonic() - began)
        assert answer.status_code == 202, answer.text
        await asyncio.sleep(0.01)
    return waits


async def _without_a_bus(spool: Path, hostile: httpx2.AsyncClient, victim: httpx2.AsyncClient) -> list[Line]:
    """Send feedback with the hostile key until it is refused, and check that the other tenant is still served."""
    await hostile.post("/v1/feedback", json=feedback_body("hostile"))
    before, sent, message = _files(spool), 0, ""
    for _ in range(_FILL_MAX):
        payload = json.dumps(feedback_body("hostile")).encode()
        answer = await hostile.post("/v1/feedback", content=payload, headers=_JSON)
        if answer.status_code == 429:
            await asyncio.sleep(0.2)
        elif answer.status_code == 503:
            message = answer.json()["error"]["message"]
            break
        else:
            sent += len(payload)
    served = [
        (await victim.post("/v1/feedback", json={"session_id": "mine", "value": 1})).status_code for _ in range(20)
    ]
    refused = sum(status != 202 for status in served)
    grown = (_files(spool) - before) / max(1, sent)
    return [
        at_most("without a bus: bytes in the spool's files for one of the request", round(grown, 2), _GROWTH_MAX),
        Line("the hostile key is refused at its part of the spool", message or "never", "says so", "part" in message),
        Line("the other tenant is served all the same", f"{refused} of {len(served)} refused", "0", refused == 0),
    ]


def _files(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


CALLS = 60
"""Number of the ordinary tenant's sequential calls under each load, and of its calls without load."""
_ROUNDS = 4
"""Number of rounds. Rounds without and with load alternate, so that both suffer equally from a busy machine."""
TOKENS = 16
RATIO_MAX = 2.0
_CONNECTIONS = 24
_PLAYS = 200
_SETTLE_S = 3.0
_KINDS = {
    "choices": f"n = 16 on {_CONNECTIONS} connections",
    "prompts": f"prompts of 1,500 tokens on {_CONNECTIONS} connections",
    "feedback": "a flood of feedback on 64 connections",
    "plays": f"an evaluation of {_PLAYS} plays, all at once",
}


@attack("a tenant that asks for all that it can leaves another tenant its pace")
async def greedy_tenant(folder: Path, rng: random.Random) -> list[Line]:
    """Measure the ordinary tenant's calls without load and under each kind of load, in alternating rounds.

    `python -m tests.attack.attacks.greedy_tenants URL KIND SEED` sends one kind of load until it is killed.
    """
    lines: list[Line] = []
    failed = calls = 0
    async with serving(folder, tenants=("modest", "greedy")) as running, aiohttp.ClientSession() as http:
        await _calls(running, http, rng, [])  # the first calls pay for what all later ones use
        for kind, words in _KINDS.items():
            alone_s, beside_s = list[float](), list[float]()
            for _ in range(_ROUNDS):
                failed += await _calls(running, http, rng, alone_s)
                async with _load(running.gateway.url, kind, rng):
                    await asyncio.sleep(_SETTLE_S)
                    failed += await _calls(running, http, rng, beside_s)
            calls += 2 * CALLS
            ratio = _p99(beside_s) / _p99(alone_s)
            tail = f"p99 {_ms(_p99(alone_s))} to {_ms(_p99(beside_s))} ms"
            figures = f"{tail}, median {_ms(_p50(alone_s))} to {_ms(_p50(beside_s))} ms"
            print(f"    {kind}: {figures}", flush=True)
            lines.append(at_most(f"{words}: the other tenant's p99 grows", round(ratio, 2), RATIO_MAX, "x"))
    return [*lines, none_of("calls of the other tenant that failed", failed, calls)]


async def _calls(running: Serving, http: aiohttp.ClientSession, rng: random.Random, seconds: list[float]) -> int:
    """Make the calls of one round, append the seconds of each to `seconds`, and return how many failed."""
    failed = 0
    for _ in range(CALLS // _ROUNDS):
        body = _chat(rng, 40, max_tokens=TOKENS)
        began = time.perf_counter()
        headers = {"authorization": "Bearer modest"}
        async with http.post(f"{running.gateway.url}/v1/chat/completions", json=body, headers=headers) as answer:
            await answer.read()
            failed += answer.status != 200
        seconds.append(time.perf_counter() - began)
        await asyncio.sleep(0.02)
    return failed


def _chat(rng: random.Random, length: int, **fields: object) -> dict[str, object]:
    text = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz 0123456789", k=length))
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


@contextlib.asynccontextmanager
async def _load(url: str, kind: str, rng: random.Random) -> AsyncIterator[None]:
    command = (sys.executable, "-m", __name__, url, kind, str(rng.randrange(2**32)))
    process = await asyncio.create_subprocess_exec(*command)
    try:
        yield
        assert process.returncode is None, "the load ended early"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _ask_for_all(url: str, kind: str, rng: random.Random) -> None:
    """Send one kind of load: each connection sends its next request as soon as the previous one is answered."""
    headers = {"authorization": "Bearer greedy"}
    if kind == "plays":
        headers["x-headrace-purpose"] = "eval"
    connections = {"feedback": 64, "plays": _PLAYS}.get(kind, _CONNECTIONS)
    connector = aiohttp.TCPConnector(limit=0)

    async def connection(number: int) -> None:
        turn = 0
        while True:
            turn += 1
            path, body = "/v1/chat/completions", _chat(rng, 40, max_tokens=64)
            if kind == "choices":
                body |= {"n": 16}
            elif kind == "prompts":
                body = _chat(rng, 1500, max_tokens=4)
            elif kind == "feedback":
                path, body = "/v1/feedback", {"session_id": f"{number}-{turn}", "value": 1}
            with contextlib.suppress(aiohttp.ClientError):
                async with http.post(url + path, json=body, headers={**headers, "x-session-id": str(number)}) as answer:
                    await answer.read()

    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
        await asyncio.gather(*map(connection, range(connections)))


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[max(0, round(0.99 * len(seconds)) - 1)]


def _p50(seconds: list[float]) -> float:
    return statistics.median(seconds)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)


if __name__ == "__main__":
    asyncio.run(_ask_for_all(sys.argv[1], sys.argv[2], random.Random(int(sys.argv[3]))))
