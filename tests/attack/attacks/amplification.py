"""Feedback requests that become many events: the bytes that they add to the bus, and their effect on another tenant."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2
from aiokafka import ConsumerRecord

from headrace_runtime.settings.sections import BusSettings
from tests.support.hostile_json import SESSIONS, feedback_body
from tests.support.servers import BrokerProcess
from tests.support.service_process import GatewayProcess, read_topic
from tests.system.program import Line, at_most

TITLE = "one request becomes many events"
_SPOOL_BYTES_MAX = 2_000_000
_WINDOW_S = 5.0
_WINDOWS = 6
_REQUESTS = 20
_GROWTH_MAX = 10.0
_FILL_MAX = 400
_JSON = {"content-type": "application/json"}


async def attack(folder: Path, rng: random.Random) -> list[Line]:
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


def _p99(waits: list[float]) -> float:
    return sorted(waits)[int(len(waits) * 0.99)]


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
