"""Slow, silent and ambiguous HTTP, bodies that block event loops, and a hostile page in a browser."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import httpx2

from headrace_operations.supervisor import Supervisor
from headrace_runtime.http.protocol import BODY_TIMEOUT_S, HEADER_TIMEOUT_S
from tests.attack.accepted_bodies import accepted_bodies
from tests.attack.program import attack
from tests.attack.stacks import MODEL, Serving, serving
from tests.support import presence, tiny_model
from tests.support.fake_llm import FakeLLM, verdict
from tests.support.fake_replica import FakeReplica
from tests.support.gateway import routing
from tests.support.processes import wait_until
from tests.support.servers import BrokerProcess
from tests.support.service_process import GatewayProcess, bus_view, wait_healthy
from tests.system.program import Line, at_least, at_most, none_of

SLOW = 300
SILENT = 1000
AMBIGUOUS = 10
SLACK_S = 5.0
PACE_S = 0.5
MARK = "smuggled"
_TARGET = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n"
HEADS = {
    "both lengths": b"Content-Length: %d\r\n" + _CHUNKED,
    "both lengths, turned round": _CHUNKED + b"Content-Length: %d\r\n",
    "two lengths": b"Content-Length: 5\r\nContent-Length: %d\r\n",
    "two codings": _CHUNKED + _CHUNKED + b"X: %d\r\n",
    "an unknown coding": b"Transfer-Encoding: xchunked\r\nContent-Length: %d\r\n",
    "a space before the colon": b"Transfer-Encoding : chunked\r\nContent-Length: %d\r\n",
    "a bare CR": b"X: y\rTransfer-Encoding: chunked\r\nContent-Length: %d\r\n",
    "a signed length": b"Content-Length: +%d\r\n",
}


@attack("slow, silent and ambiguous HTTP")
async def hostile_http(folder: Path, rng: random.Random) -> list[Line]:
    """Connect clients that send slowly, ambiguously or nothing, beside well-behaved clients that must be served."""
    broker = BrokerProcess(folder / "broker")
    await asyncio.to_thread(broker.start)
    gateway = GatewayProcess(folder / "data", broker.address)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(broker.stop)
        replica = await stack.enter_async_context(FakeReplica().running())
        view = await stack.enter_async_context(bus_view(broker.address, folder / "data"))
        stack.callback(gateway.stop)
        await view.producer.send(routing(replica.versions[0]))
        await view.producer.send(replica.heartbeat(ttl_s=600))
        await asyncio.to_thread(gateway.start)
        await asyncio.to_thread(wait_healthy, gateway.url)
        async with _behaving(gateway.url) as seen:
            silent = [asyncio.create_task(_closed_after(gateway.port, b"", b"")) for _ in range(SILENT)]
            headers = [asyncio.create_task(_closed_after(gateway.port, _TARGET + b"X: ", b"x")) for _ in range(SLOW)]
            bodies = [
                asyncio.create_task(_closed_after(gateway.port, _TARGET + b"Content-Length: 99999\r\n\r\n", b"x"))
                for _ in range(SLOW)
            ]
            answered_twice, attempts = await _ambiguous(gateway.port, rng)
            slow_s = [max(await asyncio.gather(*tasks)) for tasks in (silent, headers, bodies)]
        smuggled = sum(MARK in json.dumps(request) for request in replica.requests)
    return [
        at_most(f"{SILENT} connections that say nothing, closed after", slow_s[0], HEADER_TIMEOUT_S + SLACK_S, " s"),
        at_most(f"{SLOW} headers of a byte now and then, closed after", slow_s[1], HEADER_TIMEOUT_S + SLACK_S, " s"),
        at_most(f"{SLOW} bodies of a byte now and then, closed after", slow_s[2], BODY_TIMEOUT_S + SLACK_S, " s"),
        none_of("ambiguous requests that were served or left their connection open", answered_twice, attempts),
        none_of("requests smuggled in behind them that reached a replica", smuggled, attempts),
        none_of("failed calls of clients that behave", seen.count(0), len(seen)),
    ]


async def _closed_after(port: int, start: bytes, drip: bytes) -> float:
    """Send `start`, then `drip` again and again. Return the seconds until the gateway closes the connection, else
    infinity.
    """
    began = time.monotonic()
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(3 * (HEADER_TIMEOUT_S + BODY_TIMEOUT_S)):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(start)
            dripping = asyncio.create_task(_drip(writer, drip))
            try:
                while await reader.read(65_536):
                    pass
            finally:
                dripping.cancel()
                writer.close()
            return round(time.monotonic() - began, 1)
    if time.monotonic() - began < 3 * (HEADER_TIMEOUT_S + BODY_TIMEOUT_S):
        return round(time.monotonic() - began, 1)
    return float("inf")


async def _drip(writer: asyncio.StreamWriter, drip: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        while drip:
            await asyncio.sleep(PACE_S)
            writer.write(drip)
            await writer.drain()


async def _ambiguous(port: int, rng: random.Random) -> tuple[int, int]:
    """Send ambiguous requests. Return the number of those that got anything but one refusal and a closed connection,
    and of all.
    """
    names = [name for name in HEADS for _ in range(AMBIGUOUS)]
    rng.shuffle(names)
    wrong = 0
    for name in names:
        hidden = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": MARK}]}).encode()
        inner = _TARGET + b"Content-Length: %d\r\n\r\n%b" % (len(hidden), hidden)
        body = b"0\r\n\r\n" + inner
        answer = await _answer(port, _TARGET + HEADS[name] % len(body) + b"\r\n" + body)
        refused = answer is not None and answer.count(b"HTTP/1.1 ") == 1 and answer[9:10] in (b"4", b"5")
        if not refused:
            print(f"    {name}: {answer!r:.300}")
        wrong += not refused
    return wrong, len(names)


async def _answer(port: int, data: bytes) -> bytes | None:
    """Send `data` and return all bytes until the connection is closed, or None if the gateway leaves it open."""
    answer = b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        async with asyncio.timeout(HEADER_TIMEOUT_S / 2):
            with contextlib.suppress(ConnectionError):
                while more := await reader.read(65_536):
                    answer += more
            return answer
    except TimeoutError:
        return None
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def _behaving(url: str) -> AsyncIterator[list[int]]:
    """Call the gateway in sequence during the block. Yield a list that gets 1 for each answered call and 0 for any
    other.
    """
    seen: list[int] = []

    async def call() -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=30) as client:
            while True:
                body = {"model": "tiny", "messages": [{"role": "user", "content": f"question {len(seen)}"}]}
                with contextlib.suppress(httpx2.HTTPError):
                    answer = await client.post("/v1/chat/completions", json=body)
                    seen.append(int(answer.status_code == 200))
                    continue
                seen.append(0)

    task = asyncio.create_task(call())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.wait([task])


_LIMIT_S = 0.1
_FRIENDS_PER_S = 10
_ATTEMPTS = 4
"""Number of attempts. A body that blocks a loop does so every time; on a busy machine the thread that holds the
interpreter lock is delayed now and then.
"""
_JSON = {"content-type": "application/json"}


@attack("no request blocks an event loop", timeout_s=3600.0)
async def blocked_loops(folder: Path, rng: random.Random) -> list[Line]:
    """Send bodies that take long to parse: first refused ones, then the largest that each route accepts."""
    bodies = hostile(rng)
    order = [(name, where) for name in bodies for where in ("gateway", "replica")]
    rng.shuffle(order)
    longest = {(process, kind): (0.0, "") for process in ("gateway", "replica") for kind in ("busy", "late")}
    strange: list[str] = []
    async with serving(folder) as running, httpx.AsyncClient(timeout=120) as http:
        await asyncio.to_thread(wait_until, lambda: _quiet(running), 300, "the start is over")
        friends = asyncio.create_task(_friends(running))
        for name, where in order:
            url = running.gateway.url if where == "gateway" else running.replica.url
            for _ in range(_ATTEMPTS):
                answer = await http.post(f"{url}/v1/chat/completions", content=bodies[name], headers=_JSON)
                if answer.status_code not in (200, 400, 413):
                    strange.append(f"{name} at {where}: {answer.status_code} {answer.text[:200]}")
                blocked = await asyncio.to_thread(_blocks, running)
                if max(blocked.values()) <= _LIMIT_S:
                    break
                await asyncio.to_thread(wait_until, lambda: _quiet(running), 300, "the loops run freely again")
            for key, block_s in blocked.items():
                longest[key] = max(longest[key], (block_s, f"{name} at the {where}"))
        friends.cancel()
        served, failed = await friends
    lines = [
        at_most(f"{process}: longest that its loop {verb} ({name})", round(1000 * block_s, 1), 1000 * _LIMIT_S, " ms")
        for process in ("gateway", "replica")
        for kind, verb in (("busy", "computed"), ("late", "stood still"))
        for block_s, name in [longest[process, kind]]
    ]
    other = "; ".join(strange) or f"0 of {len(order)}"
    accepted = await accepted_bodies(folder / "accepted", rng)
    return [
        *lines,
        *accepted,
        Line("hostile requests answered with other than 200, 400 or 413", other, "0", not strange),
        none_of("small requests beside them that failed", failed, served),
    ]


def hostile(rng: random.Random) -> dict[str, bytes]:
    """Return hostile bodies by name. Each is as expensive to parse as the size limits allow."""
    word = "".join(rng.choice("abcdefgh ,{[") for _ in range(4000))
    user = [{"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": {"name": "f", "description": word[:3600], "parameters": {"a": [1, 2]}}}
    options: dict[str, object] = {"n": 16, "logprobs": True, "top_logprobs": 20, "max_tokens": 100, "temperature": 1.0}
    bodies: dict[str, dict[str, object]] = {
        "3.7 MB of tools": {"tools": [tool] * 1000},
        "a megabyte of tools": {"tools": [tool] * 270},
        "8 MB of messages": {"messages": [{"role": "user", "content": (word * 300)[:1_000_000]}] * 8},
        "8,192 messages": {"messages": [{"role": "user", "content": word[:900]}] * 8192},
        "a megabyte without a space": {"messages": [{"role": "user", "content": "x" * 1_000_000}]},
        "a megabyte of control tokens": {"messages": [{"role": "user", "content": "<|im_end|>" * 100_000}]},
        "escapes": {"messages": [{"role": "user", "content": '\\"' * 500_000}]},
        "deep JSON": {"metadata": _deep(100)},
        "template variables": {"chat_template_kwargs": {f"k{i}": word for i in range(200)}},
        "16 stop strings of 512": {"stop": [word[i : i + 512] for i in range(16)], **options},
        "16 choices with 20 logprobs": options,
    }
    plain = {name: json.dumps({"model": MODEL, "messages": user, **body}).encode() for name, body in bodies.items()}
    raw = {
        "8 MB of brackets": b"[" * 8_000_000,
        "8 MB of numbers": b'{"model":"tiny","metadata":{"a":[' + b"0," * 3_900_000 + b"0]}}",
        "8 MB of keys": ("{" + ",".join(f'"k{i}":1' for i in range(600_000)) + "}").encode(),
        "8 MB of escapes in no string's end": b'{"model":"' + b'\\"' * 3_900_000,
    }
    return plain | raw


def _deep(depth: int) -> dict[str, object]:
    inner: dict[str, object] = {}
    for _ in range(depth):
        inner = {"a": inner}
    return inner


def _blocks(running: Serving) -> dict[tuple[str, str], float]:
    """Return the longest loop block in seconds, by process and kind of loop."""
    kinds = ("busy", "late")
    return {(process, kind): block_s for kind in kinds for process, block_s in running.block_s(kind).items()}


def _quiet(running: Serving) -> bool:
    return max(_blocks(running).values()) < _LIMIT_S / 2


async def _friends(running: Serving) -> tuple[int, int]:
    """Send small requests at a steady pace until cancelled. Return how many were answered, and how many failed."""
    served = failed = 0
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    async with httpx.AsyncClient(timeout=60, base_url=running.gateway.url) as http:
        try:
            while True:
                answer = await http.post("/v1/chat/completions", json=body)
                served += 1
                failed += answer.status_code != 200
                await asyncio.sleep(1 / _FRIENDS_PER_S)
        except asyncio.CancelledError:
            return served, failed


_FOLDER = Path(__file__).parents[1]
_PROGRAM, _SEEN = _FOLDER / "browser.py", _FOLDER / "seen_requests"


@attack("a hostile page and DNS rebinding, in a real browser")
async def web_pages(folder: Path, rng: random.Random) -> list[Line]:
    """Try every route of every service from a hostile page, in all fetch modes.

    The page is served from another port of this machine, from another site, and from a name that DNS rebinding points
    at the service. Every process records which requests of the browser arrived, and which
    reached its handlers: none may.
    """
    if reason := presence.missing_browser():
        return [Line("a page in a real browser", f"not played: {reason}", "played where there is a browser", True)]
    base = await asyncio.to_thread(tiny_model.build, folder / "base", seed=rng.randrange(2**31))
    notes = folder / "notes"
    notes.mkdir()
    (folder / "rewards.py").write_text("def fine(trajectory):\n    return 1.0\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    environ |= {"PYTHONPATH": os.pathsep.join([str(_SEEN), str(folder)]), "SEEN_REQUESTS": str(notes)}
    with FakeLLM(verdict(outcome=4, grounding=4, conduct=3, clarity=5)) as judge, contextlib.ExitStack() as running:
        settings: dict[str, object] = {
            "scorer.functions": [f"{folder}/rewards.py:fine"],
            "judge.endpoint.base_url": judge.base_url,
            "judge.endpoint.model": "judge",
            "trainer.base": base,
            "trainer.model": "m",
            "trainer.compute.device": "cpu",
            "inference.torch.device": "cpu",
        }
        supervisor = Supervisor(folder / "data", settings=settings, auto_ports=True, environ=environ)
        running.callback(supervisor.stop)
        supervisor.start()
        await asyncio.to_thread(supervisor.wait_ready, 300)
        routes = _notes(notes, "route")
        names = {service.info.module: service.name for service in supervisor.plan.services}
        targets = [
            {
                "url": supervisor.url(name),
                "routes": [[entry["path"], entry["methods"]] for entry in routes if entry["service"] == module],
            }
            for module, name in names.items()
        ]
        answers = await asyncio.to_thread(presence.drive, _PROGRAM, {"targets": targets})
        arrived, reached = _notes(notes, "arrived"), _notes(notes, "reached")
    requests_by_service = Counter(entry["service"] for entry in arrived)
    silent = [name for module, name in names.items() if not requests_by_service[module]]
    return [
        none_of(f"requests of a page that reached code {_summary(reached)}".strip(), len(reached), len(arrived)),
        none_of("answers that a page could read", len(answers["readable"]), answers["tried"]),
        none_of(f"services that no request of the browser arrived at {silent or ''}".strip(), len(silent), len(names)),
        at_least("routes of all services that were tried", sum(len(entry["routes"]) for entry in targets), 40),
    ]


def _notes(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [line for path in sorted(folder.iterdir()) for line in path.read_text(encoding="utf-8").splitlines()]
    return [note for note in map(json.loads, lines) if note["kind"] == kind]


def _summary(reached: list[dict[str, Any]]) -> str:
    return (
        str(sorted({f"{entry['method']} {entry['service']}{entry['path']}" for entry in reached})[:10])
        if reached
        else ""
    )
