"""Load of the attacking tenant: `python -m tests.attack.neighbour_load URL BUS KIND SEED` runs until SIGTERM.

Then it prints one JSON object with the number of times that each input received each answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiokafka import AIOKafkaProducer

from headrace_schemas import Feedback
from headrace_schemas.events.envelope import Envelope
from headrace_schemas.values import ids
from headrace_schemas.values.base import utcnow
from tests.attack.stacks import MODEL

TENANT = "mallory"
GARBLE = "garble the verdict"
"""Text in a conversation for which the judge's endpoint returns an invalid answer."""
REFUSED_RECORDS = 200
RESULTS = ("huge", "nul", "surrogate", "unprintable", "exit", "leave", "many", "deep")
"""Hostile results that a context can request from the reward function `tests.attack.neighbour_rewards`."""
_AT_ONCE = 4
_LONG = "a-" * 9000
_REFUSED_S = 0.05
"""Pause after a 429, in seconds."""


@dataclass
class Load:
    """The attacker's connection, and the counts of the answers that it received."""

    http: aiohttp.ClientSession
    bus: str
    version: str
    rng: random.Random
    answers: Counter[str] = field(default_factory=Counter)
    number: int = 0

    async def post(self, label: str, path: str, body: object, headers: dict[str, str] | None = None) -> dict[str, Any]:
        """Send `body` as JSON, or unchanged if it is bytes, and return the answer's JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **(headers or {})}
        try:
            async with self.http.post(path, data=data, headers=sent) as answer:
                text = await answer.text()
        except aiohttp.ClientError as error:
            self.answers[f"{label}: {type(error).__name__}"] += 1
            return {}
        self.answers[f"{label}: {answer.status}"] += 1
        if answer.status == 429:
            await asyncio.sleep(_REFUSED_S)
        return json.loads(text) if answer.status in (200, 202) and text else {}

    async def chat(self, label: str, content: str, **fields: object) -> str:
        """Call the model in a new session. Return the response id, or an empty string when the call is refused."""
        self.number += 1
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 2, **fields}
        named = {"x-session-id": f"hostile-{os.getpid()}-{self.number}"}
        return str((await self.post(label, "/v1/chat/completions", body, named)).get("id", ""))


async def raters(load: Load) -> None:
    """Send feedback with 32 parts from each of six raters. The context makes the reward function return a hostile
    result.
    """
    response = await load.chat("a call", "Rate me.")
    if not response:
        return
    results = {"result": load.rng.choice(RESULTS)}
    for rater in range(6):
        parts = {f"m{rater}-{part}": load.rng.random() for part in range(32)}
        body = {"response_id": response, "parts": parts, "rater": f"r{rater}", "context": results}
        await load.post("32 parts", "/v1/feedback", body | {"ends_session": rater == 5})


async def verdicts(load: Load) -> None:
    """Play a run for which the judge's endpoint returns an invalid answer."""
    response = await load.chat("a call", f"{GARBLE} {load.rng.randrange(3)} {load.rng.random()}")
    if response:
        await load.post("an end", "/v1/feedback", {"response_id": response, "value": 1, "ends_session": True})


async def bodies(load: Load) -> None:
    """Send the largest bodies that each route accepts, and larger ones."""
    for label, path, body in large_bodies(load.version, load.rng):
        await load.post(label, path, body)


async def records(load: Load) -> None:
    """Write feedback to the bus that the services refuse, and feedback that refers to no turn."""
    producer = AIOKafkaProducer(bootstrap_servers=load.bus, acks="all")
    await producer.start()
    try:
        for number in range(REFUSED_RECORDS // _AT_ONCE):
            key = ids.session_key(TENANT, f"records-{number}")
            event = Feedback(
                time=utcnow(), feedback_id=ids.uuid7().hex, session_key=key, tenant=TENANT, value=1.0, source="user"
            )
            headers = Envelope.of(event, "outside").headers()
            value = json.loads(event.to_json())
            hostile: dict[str, Any] = load.rng.choice(
                (
                    {"value": 1.7e308},
                    {"source": "judge:helpfulness"},
                    {"source": "function:strange"},
                    {"parts": {f"m{part}": 1.0 for part in range(65)}},
                    {"context": {"a": [0] * 20_000}},
                    {"comment": "a\x00b"},
                    {"value": 1e6, "parts": {f"m{part}": -1e6 for part in range(32)}},
                )
            )
            encoded = json.dumps(value | hostile).encode()
            await producer.send_and_wait("feedback", encoded, key.encode(), headers=list(headers))
            load.answers[f"{next(iter(hostile))}: sent"] += 1
    finally:
        await producer.stop()
    await asyncio.sleep(3600)


async def names(load: Load) -> None:
    """Send names, keys, paths and headers of 18 KB."""
    await load.post("unknown field", "/v1/feedback", {"session_id": "a", "value": 1, _LONG: 1})
    await load.post("unknown field", "/v1/chat/completions", {"model": MODEL, "messages": [], _LONG: 1})
    await load.post("unknown field", "/v1/responses", {"model": MODEL, "input": "a", _LONG: 1})
    hostile = load.rng.choice((_LONG, "x@" * 4000, "password=" * 2000, "://:" * 4000, "a." * 9000, "\x1b]0;t\x07"))
    await load.post("context keys", "/v1/feedback", {"session_id": "a", "value": 1, "context": {hostile: {hostile: 1}}})
    await load.post("a value", "/v1/feedback", {"session_id": hostile, "value": 1})
    await load.post("a model", "/v1/chat/completions", {"model": hostile, "messages": []})
    await load.post("a path", f"/v1/sessions/{'a-' * 3500}/end", {})
    headers = {load.rng.choice(("x-session-id", "x-task-id", "traceparent", "authorization-x")): _LONG}
    await load.post("a header", "/v1/feedback", {"session_id": "a", "value": 1}, headers)


async def expressions(load: Load) -> None:
    """Play a run whose answer is compared with the caller's regular expression."""
    response = await load.chat("a call", "a" * 300, max_tokens=64)
    hostile = load.rng.choice(
        ("(a+)+$", "(.*a){25}", "(a|aa)+$", "(?:a?){900}a{900}", "((a*)*)*b", ".*" * 300, "(" * 500)
    )
    body = {"response_id": response, "value": 1, "ends_session": True, "context": {"format": hostile}}
    if response:
        await load.post("a format", "/v1/feedback", body)


async def tokens(load: Load) -> None:
    """Send token ids without an embedding row, edge-case numbers, forced tool calls and slow grammars."""
    await load.chat("<extra_1>", "a <extra_1> <extra_63>")
    await load.chat("temperature 1e-39", "a", temperature=1e-39)
    function = {"name": f"f{load.number}", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
    tools = [{"type": "function", "function": function}]
    await load.chat("a forced call", "a", tools=tools, tool_choice="required", max_tokens=16)
    name = {"name": f"s{load.number}", "strict": True, "schema": _grammar(load.rng)}
    await load.chat("a grammar", "a", response_format={"type": "json_schema", "json_schema": name}, max_tokens=8)


def _grammar(rng: random.Random) -> dict[str, Any]:
    """Return a JSON schema that is near a size limit and differs from all earlier ones, so that no cache helps."""
    unique = rng.randrange(10**9)
    match rng.randrange(4):
        case 0:
            return {"type": "string", "pattern": f"^(a?){{400}}a{{400}}{unique}$"}
        case 1:
            return {"enum": [f"{unique}-{number}-{'x' * 40}" for number in range(1000)]}
        case 2:
            inner: dict[str, Any] = {"type": "string", "maxLength": 5000 + unique % 1000}
            for level in range(20):
                inner = {"type": "object", "properties": {f"p{level}": inner, "b": inner and {"type": "integer"}}}
            return inner
        case _:
            fields = {f"k{unique}{number}": {"type": "string", "pattern": "^[a-z]{1,60}$"} for number in range(400)}
            return {"type": "object", "properties": fields}


def large_bodies(version: str, rng: random.Random) -> list[tuple[str, str, bytes]]:
    """Return the label, the path and the content of each large body."""
    session = f"large-{os.getpid()}-{rng.randrange(10**9)}"
    now = utcnow().isoformat()
    message = {"role": "user", "content": "a"}

    def trajectory(**fields: object) -> bytes:
        names = {"trajectory_id": f"{session}-{rng.randrange(10**9)}", "session_id": session, "model": MODEL}
        branch = {"token_ids": [1, 2, 3], "spans": [_span(0, f"{session}-{rng.randrange(10**9)}", version)]}
        return _encoded({**names, "started_at": now, "branches": [branch], **fields})

    def feedback(context: object) -> bytes:
        return _encoded({"session_id": session, "value": 1, "context": context})

    def spans(count: int) -> list[dict[str, Any]]:
        return [_span(start, f"{session}-{start}-{rng.randrange(10**9)}", version) for start in range(count)]

    def branches(count: int) -> list[dict[str, Any]]:
        return [{"token_ids": [1] * 4000, "spans": spans(4000)} for _ in range(count)]

    called = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calling = {"role": "assistant", "content": None, "tool_calls": [called] * 64}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": [0] * 240}}}
    chat = {"model": MODEL, "max_tokens": 1}
    return [
        ("2.6 million values", "/v1/feedback", b'{"session_id":"a","context":{"a":[' + b"0," * 2_600_000 + b"0]}}"),
        ("16,000 values", "/v1/feedback", feedback({"a": [0] * 16_000})),
        ("16,000 objects", "/v1/feedback", feedback({"a": [{"a": 0}] * 8000})),
        ("16,000 keys", "/v1/feedback", feedback({"a": {f"€{number:06}" * 9: 1 for number in range(15_800)}})),
        ("250,000 tokens", "/v1/trajectories", trajectory(branches=[{"token_ids": [1] * 250_000, "spans": spans(2)}])),
        ("the most spans", "/v1/trajectories", trajectory(branches=branches(2))),
        ("more spans", "/v1/trajectories", trajectory(branches=branches(3))),
        ("16,000 messages", "/v1/trajectories", trajectory(dialogues=[{"messages": [message] * 8000}] * 2)),
        ("80,000 messages", "/v1/trajectories", trajectory(dialogues=[{"messages": [message] * 8000}] * 10)),
        ("calls in messages", "/v1/trajectories", trajectory(dialogues=[{"messages": [calling] * 120}])),
        ("1,000 tools", "/v1/trajectories", trajectory(tools=[tool] * 1000)),
        ("32,000 facts", "/v1/trajectories", trajectory(context={"a": [0] * 32_000})),
        ("8,000 messages", "/v1/chat/completions", _encoded({**chat, "messages": [message] * 8000})),
        (
            "30,000 values of a tool",
            "/v1/chat/completions",
            _encoded(
                {
                    **chat,
                    "messages": [message],
                    "tools": [{**tool, "function": {"name": "f", "parameters": {"a": [0] * 30_000}}}],
                }
            ),
        ),
        (
            "8,000 items",
            "/v1/responses",
            _encoded({"model": MODEL, "input": [message] * 8000, "max_output_tokens": 16}),
        ),
    ]


def _span(start: int, turn: str, version: str) -> dict[str, Any]:
    return {"start": start, "logprobs": [-0.5], "turn_id": turn, "version": version}


def _encoded(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


KINDS: dict[str, tuple[str, Callable[[Load], Awaitable[None]]]] = {
    "raters": ("32 parts by each of 6 raters, and hostile reward functions", raters),
    "verdicts": ("answers of the judge's endpoint that are no verdicts", verdicts),
    "bodies": ("the largest bodies that are taken, and larger ones", bodies),
    "records": (f"{REFUSED_RECORDS} refused records on the bus", records),
    "names": ("names, keys, paths and headers of 18 KB", names),
    "expressions": ("regular expressions of the caller's", expressions),
    "tokens": ("tokens without a row, edges of numbers, forced calls, grammars", tokens),
}
"""Description of each kind of load, and the function that sends one round of it."""


async def main() -> None:
    os.nice(10)  # an attacker has a machine of its own: what it computes here is not taken from the stack
    url, bus, version, kind, seed = sys.argv[1:]
    headers = {"authorization": f"Bearer {TENANT}"}
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, headers=headers, timeout=timeout) as http:
        loads = [Load(http, bus, version, random.Random(f"{seed} {number}")) for number in range(_AT_ONCE)]
        work = [asyncio.create_task(_repeat(load, KINDS[kind][1])) for load in loads]
        ended = asyncio.create_task(stopped.wait())
        await asyncio.wait([ended, *work], return_when=asyncio.FIRST_COMPLETED)
        for task in work:
            if task.done():
                task.result()  # a fault of the attack itself
            task.cancel()
    print(json.dumps(sum((load.answers for load in loads), Counter())), flush=True)


async def _repeat(load: Load, attack: Callable[[Load], Awaitable[None]]) -> None:
    while True:
        await attack(load)


if __name__ == "__main__":
    asyncio.run(main())
