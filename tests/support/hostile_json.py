"""Valid, nearly valid and hostile requests for every route of the gateway that takes a body.

`requests(random)` yields a route and a body without end: a valid body with one or two values replaced, repeated or
extended. Equal seeds give equal requests. `kinds_everywhere(body)` yields each body with a value of another JSON type
at one place. `event_examples` reads the published events. `draw` returns session ids that are easily confused with each
other, and `post` sends them byte for byte.
"""

from __future__ import annotations

import asyncio
import copy
import http.client
import itertools
import json
import os
import random
import socket
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlsplit

import httpx2

import headrace_schemas
from headrace_schemas.values import ids
from headrace_schemas.values.ids import decode_name
from tests.support.presence import draw_seed
from tests.support.turns import ask, closed, user

EXAMPLES: dict[str, dict[str, dict[str, Any]]] = json.loads(
    (Path(headrace_schemas.__file__).parent / "examples.json").read_bytes()
)
SESSION = "s"
KEY = ids.session_key("default", SESSION)
RESPONSES = [ids.response_id(KEY) for _ in range(3)]

TEXTS = (
    "", "\0", "a\0b", "\x1b[31m\x9b", "\u202eabc\u200b", "é" * 600, "x" * 18_432, "a-" * 9000, "judge:x", "Function",
    "learned：y", "NaN", "1e999", "\n", "chatcmpl-" + KEY + "-" + "0" * 32,
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 0.5, 1e6, 1e6 + 1, -1e6, 1e39, 3.5e38, 1.7e308, -1.7e308, 1e-39, 1e-320, float("nan"), float("inf"),
    float("-inf"), 2**31 - 1, 2**31, 2**53, 2**63, 2**64, 10**400, True,
)  # fmt: skip
LENGTHS = (0, 2, 31, 32, 33, 64, 65, 128, 1024)

KINDS: tuple[Any, ...] = (
    None, True, 0, -1.5, "", "text", {}, [], [None], [[]], [{}], {"a": {"b": []}}, {"type": {}}, {"type": []},
)  # fmt: skip
"""One value of each JSON type, and objects and lists that contain further ones."""

EDIT = {"role": "assistant", "content": "better", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 7}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": SCHEMA, "strict": True}}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "q"}], "name": "n"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
    {"role": "tool", "tool_call_id": "c", "content": "found"},
    {"role": "user", "content": "hello"},
]
NAMED_TOOL = {"type": "function", "name": "look", "description": "d", "parameters": SCHEMA, "strict": True}
TEXT_FORMAT = {"type": "json_schema", "name": "n", "schema": SCHEMA}
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
    {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
    {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"a": 1}'},
    {"type": "function_call_output", "call_id": "c", "output": "found"},
]
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "q", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "r", "signature": "s"}, {"type": "text", "text": "a"},
        {"type": "tool_use", "id": "c", "name": "look", "input": {"a": 1}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "found"}], "is_error": False},
    ]},
]  # fmt: skip
BLOCK_TOOL = {"name": "look", "description": "d", "input_schema": SCHEMA}
ASKED = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": 7, "stop": ["end"], "n": 1, "presence_penalty": 0.0}


def event_examples(topic: str) -> dict[str, dict[str, Any]]:
    """Return the published examples of the events of a topic by name."""
    return copy.deepcopy(EXAMPLES[topic])


def _trajectory() -> dict[str, Any]:
    turn = ask([user("q")], session=f"other-{random.random()}", turn_id=f"t-{random.random()}")
    fields: dict[str, Any] = json.loads(closed(turn, end_reason="ingest").to_json())
    fields["branches"] = [{"token_ids": [1, 2, 3, 4], "spans": [{**span, "logprobs": [-0.5, -1.0], "start": 1}]}
                          for branch in fields["branches"] for span in branch["spans"]]  # fmt: skip
    fields["trajectory_id"] = f"t-{random.random()}"
    return {**fields, "context": {"expected": "42"}, "tools": [TOOL], "task_id": "task"}


def kinds_everywhere(
    body: dict[str, Any], names: Iterable[str] = (), kinds_per_place: int = len(KINDS)
) -> Iterator[Any]:
    """Yield each of `KINDS` in place of `body`, at each place in `body`, and at each of the top-level `names`.

    Args:
        body: a valid body.
        names: top-level names, whether or not `body` has them.
        kinds_per_place: number of kinds at each place, a sample by the seed of the running test.
    """
    yield from KINDS
    chance = random.Random(draw_seed())
    for path in (*_paths(body), *((name,) for name in names if name not in body)):
        for kind in chance.sample(KINDS, kinds_per_place):
            changed = copy.deepcopy(body)
            target: Any = changed
            for name in path[:-1]:
                target = target[name]
            target[path[-1]] = kind
            yield changed


def bases() -> list[tuple[str, dict[str, Any]]]:
    """Return a route and a valid body for each form of each route."""
    feedback_fields = {
        "session_id": SESSION,
        "source": "user",
        "rater": "r",
        "comment": "c",
        "context": {"a": [1, {"b": "x"}]},
    }
    named = {"response_id": RESPONSES[0], "task_id": "task", "run_id": 7, "feedback_id": "f"}
    chat = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL], "max_tokens": 4, **ASKED, "user": "u"}
    again = {"metadata": {"session_id": SESSION, "task_id": "task"}, "chat_template_kwargs": {"a": {"b": [1]}}}
    return [
        ("/v1/feedback", {**feedback_fields, "value": 1.0, "metric": "tone"}),
        ("/v1/feedback", {**feedback_fields, "rating": 4, "scale": [1, 5]}),
        ("/v1/feedback", {**feedback_fields, "parts": {"tone": 0.5, "facts": 1}}),
        ("/v1/feedback", {**feedback_fields, "label": "good"}),
        ("/v1/feedback", {**named, "edit": EDIT}),
        ("/v1/feedback", {**named, "value": True, "level": "response", "choice": 0}),
        ("/v1/feedback", {"preference": {"chosen": RESPONSES[0], "rejected": {"response_id": RESPONSES[1]}}}),
        ("/v1/feedback", {"level": "task", "task_id": "task", "value": 0.5, "context": {"a": 1}}),
        ("/v1/feedback", {"msg_ids": RESPONSES, "value": 0.25, "context": {"facts": ["x"]}}),
        ("/feedback", {"msg_ids": RESPONSES, "reward": 1.0, "task_id": "task", "run_id": 3}),
        ("/commit", {"time_threshold": 1_700_000_000}),
        ("/v1/trajectories", _trajectory()),
        ("/v1/chat/completions", {**chat, **again}),
        ("/v1/chat/completions", {**chat, "response_format": FORMAT}),
        ("/v1/responses", {"model": "tiny", "input": "hello", "temperature": 1.0, "max_output_tokens": 4, **again}),
        ("/v1/responses", {"model": "tiny", "input": ITEMS, "tools": [NAMED_TOOL], "tool_choice": "auto", **again}),
        ("/v1/responses", {"model": "tiny", "input": ITEMS[:1], "text": {"format": TEXT_FORMAT}}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 4, "system": "s", "messages": BLOCKS, "tools": [BLOCK_TOOL],
                          "tool_choice": {"type": "auto"}, "stop_sequences": ["end"], "top_k": 3, **again}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 4, "messages": BLOCKS[:1], "thinking": {"type": "disabled"},
                          "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ]  # fmt: skip


def _paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield (*path, name)
        yield from _paths(inner, (*path, name))


def _nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"x": value}
    return value


def _planted(chance: random.Random) -> Any:
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: chance.choice(TEXTS),
        lambda: chance.choice(NUMBERS),
        lambda: _nested(chance.choice((63, 64, 65, 150, 190, 250))),
        lambda: [chance.choice((0, "x", {}))] * chance.choice((*LENGTHS, 20_000)),
        lambda: {f"k{n}": chance.choice(NUMBERS[:8]) for n in range(chance.choice(LENGTHS))},
        lambda: None,
    )
    return chance.choice(kinds)()


def mutated(body: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Return a copy of `body` with one or two hostile values, or an unchanged copy."""
    body = copy.deepcopy(body)
    for _ in range(chance.choice((0, 1, 1, 1, 2))):
        *path, last = chance.choice([*_paths(body)])
        target: Any = body
        for name in path:
            target = target[name]
        value = target[last]
        match chance.randrange(4):
            case 0 | 1 if isinstance(value, bool | int | float):
                target[last] = chance.choice(NUMBERS)
            case 0 | 1 if isinstance(value, str):
                target[last] = chance.choice(TEXTS)
            case 2 if isinstance(value, list) and value:
                target[last] = [*itertools.islice(itertools.cycle(value), chance.choice(LENGTHS))]
            case 2 if isinstance(value, dict):
                value[chance.choice(TEXTS)] = _planted(chance)
            case _:
                target[last] = _planted(chance)
    return body


def requests(chance: random.Random) -> Iterator[tuple[str, bytes]]:
    """Yield routes and bodies without end."""
    while True:
        route, body = chance.choice(bases())
        yield route, json.dumps(mutated(body, chance)).encode()


Carrier = Literal["latin-1 header", "utf-8 header", "http.client header", "path", "latin-1 path", "metadata"]
_LETTERS = "äöüßéèñçåøÄÖÜÉ"
_WIDE = "ａｂｃ名前Ⅷﬁжλ"
_INVISIBLE = "\u200b\u200d\u2060\ufeff\u00ad\u202e"


@dataclass(frozen=True)
class NamedSession:
    """A session id, and the way in which a client sends it."""

    name: str
    carrier: Carrier


def draw(rng: random.Random, count: int) -> list[NamedSession]:
    """Return `count` sessions with different ids.

    Among them are lookalikes of a word (case, width, NFD, zero-width characters), and words that differ in one accent.
    """
    names: dict[str, None] = {}
    while len(names) < count:
        word = "m" + rng.choice(_LETTERS) + "".join(rng.choices("lrst", k=2)) + rng.choice(["", "e", "%41", "%C3%BC"])
        lookalikes = (
            word, word.upper(), unicodedata.normalize("NFD", word), word + rng.choice(_INVISIBLE),
            word + rng.choice(_WIDE), quote(word), f"{word}/end",
        )  # fmt: skip
        names |= dict.fromkeys(lookalikes)
    return [NamedSession(name, rng.choice(_carriers(name))) for name in rng.sample(list(names), count)]


def _carriers(name: str) -> list[Carrier]:
    carriers: list[Carrier] = ["utf-8 header", "path", "metadata"]
    try:
        raw = name.encode("latin-1")
    except UnicodeEncodeError:
        return carriers
    return [*carriers, "latin-1 header", "http.client header", "latin-1 path"] if decode_name(raw) == name else carriers


def request(session: NamedSession, path: str, body: dict[str, Any]) -> tuple[bytes, list[bytes], bytes]:
    """Return the target, header lines and body of a request that names `session`."""
    headers: list[bytes] = []
    target = path.encode()
    match session.carrier:
        case "latin-1 header" | "http.client header":
            headers.append(b"X-Session-Id: " + session.name.encode("latin-1"))
        case "utf-8 header":
            headers.append(b"X-Session-Id: " + session.name.encode())
        case "path" | "latin-1 path":
            encoding = "utf-8" if session.carrier == "path" else "latin-1"
            target = f"/sessions/{quote(session.name, safe='', encoding=encoding)}{path}".encode()
        case "metadata":
            body = {**body, "metadata": {"session_id": session.name}}
    return target, headers, json.dumps(body).encode()


def post(url: str, session: NamedSession, path: str, body: dict[str, Any], key: str = "") -> tuple[int, Any]:
    """Send one request by `http.client` or over a raw socket. Return the status and the parsed body."""
    address = urlsplit(url)
    host, port = address.hostname or "", address.port or 80
    target, headers, content = request(session, path, body)
    if session.carrier == "http.client header":
        connection = http.client.HTTPConnection(host, port, timeout=60)
        named = {"X-Session-Id": session.name, "Content-Type": "application/json"}
        named |= {"Authorization": f"Bearer {key}"} if key else {}
        try:
            connection.request("POST", target.decode(), content, named)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()
    if key:
        headers = [*headers, f"Authorization: Bearer {key}".encode()]
    head = [b"POST " + target + b" HTTP/1.1", b"Host: " + address.netloc.encode(), b"Connection: close", *headers]
    head += [b"Content-Type: application/json", b"Content-Length: %d" % len(content)]
    with socket.create_connection((host, port), timeout=60) as raw:
        raw.sendall(b"\r\n".join(head) + b"\r\n\r\n" + content)
        reply = http.client.HTTPResponse(raw)
        reply.begin()
        return reply.status, json.loads(reply.read())


SESSIONS = 64
_AT_ONCE = 4


def feedback_body(tenant: str, sessions: int = SESSIONS) -> dict[str, object]:
    """Return the body of feedback about one answer in each of `sessions` sessions."""
    listed = [ids.response_id(ids.session_key(tenant, ids.uuid7().hex)) for _ in range(sessions)]
    return {"msg_ids": listed, "value": 1}


async def _send(client: httpx2.AsyncClient) -> None:
    while True:
        answer = await client.post("/v1/feedback", json=feedback_body("hostile"))
        await asyncio.sleep(0.02 if answer.status_code == 429 else 0)


async def send_feedback() -> None:
    os.nice(10)  # an attacker has a machine of its own: what it computes here is not taken from the gateway
    url, key = sys.argv[1:3]
    headers = {"authorization": f"Bearer {key}"}
    async with (
        httpx2.AsyncClient(base_url=url, headers=headers, timeout=30, trust_env=False) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(_AT_ONCE):
            group.create_task(_send(client))


if __name__ == "__main__":
    asyncio.run(send_feedback())
