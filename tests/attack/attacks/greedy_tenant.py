"""One tenant sends four kinds of maximum load in turn, while another tenant makes ordinary calls.

`python -m tests.attack.attacks.greedy_tenant URL KIND SEED` sends one kind of load until it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp

from tests.attack.stacks import MODEL, Serving, serving
from tests.system.program import Line, at_most, none_of

TITLE = "a tenant that asks for all that it can leaves another tenant its pace"
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


async def attack(folder: Path, rng: random.Random) -> list[Line]:
    """Measure the ordinary tenant's calls without load and under each kind of load, in alternating rounds."""
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
