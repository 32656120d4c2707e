"""Request bodies of one caller that take long to parse, while the services must go on serving other callers.

Bodies that are refused come first, then the largest bodies that each route accepts (`tests.attack.accepted_bodies`).
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import httpx

from tests.attack.accepted_bodies import accepted_bodies
from tests.attack.stacks import MODEL, Serving, serving
from tests.support.processes import wait_until
from tests.system.program import Line, at_most, none_of

TITLE = "no request blocks an event loop"
TIMEOUT_S = 3600.0
_LIMIT_S = 0.1
_FRIENDS_PER_S = 10
_ATTEMPTS = 4
"""Number of attempts. A body that blocks a loop does so every time; on a busy machine the thread that holds the
interpreter lock is delayed now and then.
"""

_JSON = {"content-type": "application/json"}


async def attack(folder: Path, rng: random.Random) -> list[Line]:
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
