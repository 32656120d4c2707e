"""Thousands of generated inputs for every route and topic of a whole stack, on each database, while another user works.

`tests.attack.inputs` generates the inputs: lists at and beyond their limits, numbers at the edges of float64 and
float32, every kind of text, valid and nearly valid documents. The reward function and the judge's endpoint also return
hostile values.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from headrace.producing import client_options
from headrace.topics import Range, connected
from headrace_schemas import DeadLetter, Event, Experience, Reward, Trajectory
from headrace_schemas.http.stack_access import read_token
from headrace_schemas.values import ids
from tests.attack.inputs import mutate, to_bytes
from tests.attack.program import attack
from tests.attack.route_inputs import HttpInput, KnownTurns, http_input, record_headers, topic_inputs
from tests.attack.stacks import MODEL, beside, hostile_stack
from tests.support import fake_llm
from tests.support.fake_llm import FakeLLM
from tests.support.servers import PostgresNode, missing_postgres
from tests.support.service_process import HeadraceUp
from tests.system.program import Line, at_least, at_most, none_of

OTHER_REQUESTS = 12_000
CHAT_REQUESTS = 1_500
RECORDS = 6_500
"""Number of records. With the HTTP requests this makes 20,000 inputs for each database."""
_LOOP_BLOCK_S_MAX = 1.0
_ACCEPTED_PERCENT_MIN = 10.0
"""Minimum share of accepted requests. A smaller share would mean that inputs hardly pass the gateway's checks."""
_SETTLE_S = 240.0
PLANTED = (
    "a service ends",
    "a loop is blocked",
    "another tenant's call fails",
    "an acknowledged event is dead-lettered",
    "an acknowledged feedback vanishes",
)
"""Names of the result lines, each of which has to detect one fault of `tests.attack.planted`."""
_LOOK_S = 5.0
_AT_ONCE = 16
_TAKEN = ("turn_taken", "trajectory_taken")
"""Reasons for dead-lettering the later of two trajectories with the same id: a gateway does not know other gateways'
ids.
"""
_Record = tuple[str, bytes | None, list[tuple[str, bytes]]]
"""Topic, value and headers of one record."""
_VERDICT = {"reason": "because", "criteria": {"outcome": 4, "grounding": 4, "conduct": 5, "clarity": 5}}


@dataclass
class Observations:
    """Observations of the attacker and of the other tenant during the inputs."""

    statuses: Counter[int] = field(default_factory=Counter)
    server_errors: list[str] = field(default_factory=list)
    unanswered: int = 0
    acknowledged: list[dict[str, Any]] = field(default_factory=list)
    records: int = 0
    friend_calls: int = 0
    friend_failures: list[str] = field(default_factory=list)
    friend_sessions: list[str] = field(default_factory=list)
    block_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))


@attack("generated inputs at every route and topic, on SQLite and on PostgreSQL", timeout_s=5400.0)
async def any_input(folder: Path, rng: random.Random) -> list[Line]:
    lines = await _lines_on("SQLite", folder / "sqlite", {}, rng)
    reason = missing_postgres()
    if reason is not None:
        return [*lines.values(), Line("PostgreSQL", reason, "it is there", False)]
    postgres = PostgresNode(folder / "postgres", durable=False)
    await asyncio.to_thread(postgres.start)
    try:
        on_postgres = await _lines_on("PostgreSQL", folder / "on-postgres", {"database.url": postgres.url()}, rng)
    finally:
        await asyncio.to_thread(postgres.stop)
    planted = await _lines_on("planted", folder / "planted", {}, rng, planted=True)
    caught = [
        Line(
            f"planted fault: {name}",
            "caught" if not planted[name].holds else "not caught",
            "caught",
            not planted[name].holds,
        )
        for name in PLANTED
    ]
    return [*lines.values(), *on_postgres.values(), *caught]


async def _lines_on(
    database: str, folder: Path, settings: dict[str, object], rng: random.Random, *, planted: bool = False
) -> dict[str, Line]:
    """Send the inputs to a new stack and return the result lines by name.

    With `planted`, send a tenth of the inputs to a stack with planted faults, which the lines have to detect.
    """
    verdict_rng = random.Random(rng.random())
    endpoint = fake_llm.answer(lambda _call: mutate(_VERDICT, verdict_rng).decode("utf-8", "surrogateescape"))
    with FakeLLM(endpoint) as judge:
        up = hostile_stack(folder, judge, settings, planted=planted)
        try:
            before = await asyncio.to_thread(up.start)
            seen = await _send_all(up, rng, 10 if planted else 1)
            experiences, lost = await _settle(up, seen, _SETTLE_S / 4 if planted else _SETTLE_S)
            after = up.state
            letters = await _read(up, DeadLetter)
        finally:
            await asyncio.to_thread(up.stop)
    restarted = [name for name, state in after.services.items() if state.pid != before.services[name].pid]
    paused = [name for name, state in after.services.items() if any("paus" in lack for lack in state.lacks)]
    refused = [
        letter
        for letter in letters
        if letter.headers.get("ce_source", "").startswith("headrace/gateway") and letter.reason not in _TAKEN
    ]
    if not planted:
        _explain(seen, lost, refused, [after.services[name].log for name in restarted])
    sessions = set(seen.friend_sessions)
    unrewarded = sessions - {experience.session_id for experience in experiences if experience.reward is not None}
    unseen = len(unrewarded - {experience.session_id for experience in experiences})
    span = "-".join(str(edge(int(name.rpartition("-")[2]) for name in unrewarded or {"0"})) for edge in (min, max))
    block_s, slowest = max((block_s, name) for name, block_s in seen.block_s.items())
    total, services = sum(seen.statuses.values()) + seen.unanswered, len(after.services)
    return {
        "a service ends": none_of(f"{database}: services that ended ({' '.join(restarted)})", len(restarted), services),
        "paused": none_of(f"{database}: services that paused ({' '.join(paused)})", len(paused), services),
        "a loop is blocked": at_most(
            f"{database}: longest that an event loop was blocked ({slowest})",
            round(block_s, 3),
            _LOOP_BLOCK_S_MAX,
            " s",
        ),
        "errors": none_of(f"{database}: answers 500, 502, 504 ({dict(seen.statuses)})", len(seen.server_errors), total),
        "accepted": at_least(
            f"{database}: requests that were accepted",
            round(100 * (seen.statuses[200] + seen.statuses[202]) / max(total, 1), 1),
            _ACCEPTED_PERCENT_MIN,
            " %",
        ),
        "unanswered": none_of(f"{database}: requests without an answer", seen.unanswered, total),
        "another tenant's call fails": none_of(
            f"{database}: calls of another tenant that failed", len(seen.friend_failures), seen.friend_calls
        ),
        "unrewarded": none_of(
            f"{database}: its sessions without a reward ({unseen} without experience, {span})",
            len(unrewarded),
            len(sessions),
        ),
        "an acknowledged event is dead-lettered": none_of(
            f"{database}: acknowledged events that were dead-lettered", len(refused), len(seen.acknowledged)
        ),
        "an acknowledged feedback vanishes": none_of(
            f"{database}: acknowledged feedbacks that count nowhere", len(lost), len(seen.acknowledged)
        ),
        "records": Line(f"{database}: records sent to topics", str(seen.records), "some", seen.records > 0),
    }


def _explain(seen: Observations, lost: list[str], refused: list[DeadLetter], logs: list[str]) -> None:
    """Print the first examples of each violation."""
    for letter in refused[:5]:
        print(f"    acknowledged and dead-lettered: {letter.source_topic} {letter.reason} {letter.error[:300]!r}")
    for log in logs:
        entries = [line for line in Path(log).read_text(encoding="utf-8").splitlines() if '"level": "error"' in line]
        print(f"    {log}: {entries[-1][-1200:] if entries else 'it names no error'}")
    for text in [*seen.server_errors[:5], *seen.friend_failures[:5], *lost[:5]]:
        print(f"    {text[:500]}")


async def _send_all(up: HeadraceUp, rng: random.Random, divisor: int) -> Observations:
    """Send every `divisor`-th of the inputs of a full run."""
    seen = Observations()
    root = up.base_url.removesuffix("/v1")
    async with (
        _client(root, "alice") as alice,
        _client(root, "mallory") as mallory,
        beside(_work(alice, seen)),
    ):
        turns = await _known_turns(alice, mallory)
        await _loops_run_freely(up)
        inputs, drawn = await asyncio.to_thread(_draw, turns, rng, divisor)
        async with beside(_watch_loops(up, seen)):
            records = asyncio.create_task(_send_records(up.state.bus, drawn, seen))
            await asyncio.gather(*(_send_requests(mallory, inputs[at::_AT_ONCE], seen) for at in range(_AT_ONCE)))
            await records
            await asyncio.sleep(2 * _LOOK_S)  # what the last input does to the loops is seen by one more look
        for session in turns.session_ids:
            await mallory.post(f"/v1/sessions/{session}/end", json={})
    return seen


def _draw(turns: KnownTurns, rng: random.Random, divisor: int) -> tuple[list[HttpInput], list[_Record]]:
    """Draw all requests in random order and all records, in a thread.

    Drawing takes so long that it would stop the event loop, and a client whose loop stops for 10 s loses its idle
    connections.
    """
    inputs = [http_input(turns, rng, chat=False) for _ in range(OTHER_REQUESTS // divisor)]
    inputs += [http_input(turns, rng, chat=True) for _ in range(CHAT_REQUESTS // divisor)]
    rng.shuffle(inputs)
    examples = topic_inputs()
    records: list[_Record] = []
    for _ in range(RECORDS // divisor):
        topic = rng.choice(list(examples))
        value = None if rng.random() < 0.01 else mutate(rng.choice(examples[topic]), rng)
        records.append((topic, value, record_headers(topic, rng)))
    return inputs, records


def _client(root: str, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=root, headers={"authorization": f"Bearer {key}"}, timeout=120, trust_env=False)


async def _known_turns(alice: httpx.AsyncClient, mallory: httpx.AsyncClient) -> KnownTurns:
    """Call the model in forty sessions of the attacker, so that its feedback has turns to refer to."""
    responses, sessions, version = [], [], ""
    for number in range(40):
        session = f"known-{number}"
        for _ in range(2):
            answer = await mallory.post("/v1/chat/completions", json=_call(session))
            answer.raise_for_status()
            responses.append(answer.json()["id"])
            version = answer.json()["model"]
        sessions.append(session)
    foreign = await alice.post("/v1/chat/completions", json=_call("foreign"))
    return KnownTurns(MODEL, version, tuple(responses), tuple(sessions), foreign.json()["id"])


def _call(session: str) -> dict[str, object]:
    messages = [{"role": "user", "content": f"question of {session}"}]
    return {"model": MODEL, "messages": messages, "max_tokens": 4, "metadata": {"session_id": session}}


async def _send_requests(client: httpx.AsyncClient, inputs: list[HttpInput], seen: Observations) -> None:
    for request in inputs:
        headers = [(name.encode(), value) for name, value in request.headers.items()]
        try:
            answer = await client.request(request.method, request.path, headers=headers, content=request.body)
        except (httpx.LocalProtocolError, httpx.InvalidURL):
            continue  # this client refuses to send such a header or path
        except httpx.HTTPError as error:
            seen.unanswered += 1
            seen.server_errors.append(f"{request.method} {request.path[:100]}: {error!r} after {request.body[:300]!r}")
            continue
        seen.statuses[answer.status_code] += 1
        if answer.status_code >= 500 and answer.status_code != 503:
            seen.server_errors.append(
                f"{answer.status_code} {answer.text[:200]} after {request.path[:100]} {request.body[:300]!r}"
            )
        if answer.status_code == 202 and request.path in ("/v1/feedback", "/feedback"):
            with contextlib.suppress(ValueError):
                seen.acknowledged.append(json.loads(request.body))


async def _send_records(bus: str, records: list[_Record], seen: Observations) -> None:
    producer = AIOKafkaProducer(**client_options(bus), acks="all")
    await producer.start()
    try:
        for topic, value, headers in records:
            with contextlib.suppress(KafkaError):  # larger than the topic allows
                await producer.send_and_wait(topic, value, b"key", headers=headers)
                seen.records += 1
    finally:
        await producer.stop()


async def _work(alice: httpx.AsyncClient, seen: Observations) -> None:
    """Act as the other tenant's agent until cancelled: two model calls, feedback, end of the session, and again."""
    number = 0
    while True:
        number += 1
        session = f"alice-{number}"
        responses = []
        for _ in range(2):
            answer = await _friendly(alice, "/v1/chat/completions", _call(session), seen)
            if answer is not None:
                responses.append(answer["id"])
        feedback = {"msg_ids": responses, "value": number % 2, "ends_session": True}
        if len(responses) == 2 and await _friendly(alice, "/v1/feedback", feedback, seen) is not None:
            seen.friend_sessions.append(session)
        await asyncio.sleep(0.2)


async def _friendly(alice: httpx.AsyncClient, path: str, body: object, seen: Observations) -> dict[str, Any] | None:
    seen.friend_calls += 1
    try:
        answer = await alice.post(path, json=body)
    except httpx.HTTPError as error:
        seen.friend_failures.append(f"{path}: {error!r}")
        return None
    if answer.status_code not in (200, 202):
        seen.friend_failures.append(f"{path}: {answer.status_code} {answer.text}")
        return None
    parsed: dict[str, Any] = answer.json()
    return parsed


async def _watch_loops(up: HeadraceUp, seen: Observations) -> None:
    """Record the longest block of each service's event loop at regular intervals until cancelled."""
    while True:
        for service, block_s in (await _block_s(up)).items():
            seen.block_s[service] = max(seen.block_s[service], block_s)
        await asyncio.sleep(_LOOK_S)


async def _loops_run_freely(up: HeadraceUp) -> None:
    """Wait until the gauges of loop blocks no longer include the start of the services."""
    for _ in range(int(_SETTLE_S)):
        if max((await _block_s(up)).values()) < _LOOP_BLOCK_S_MAX / 2:
            return
        await asyncio.sleep(1)


async def _block_s(up: HeadraceUp) -> dict[str, float]:
    name, block_s = 'headrace_event_loop_block_seconds{kind="busy"} ', {}
    headers = {"authorization": f"Bearer {read_token(up.folder)}"}
    async with httpx.AsyncClient(timeout=60, trust_env=False, headers=headers) as client:
        for service, state in up.state.services.items():
            with contextlib.suppress(httpx.HTTPError):
                text = (await client.get(f"{state.url}/metrics")).text
                values = [float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name)]
                block_s[service] = max([0.0, *values])
    return block_s


async def _settle(up: HeadraceUp, seen: Observations, timeout_s: float) -> tuple[list[Experience], list[str]]:
    """Wait until the other tenant's sessions have their rewards and all acknowledged feedback counts."""
    deadline = time.monotonic() + timeout_s
    while True:
        experiences = await _read(up, Experience)
        rewarded = {experience.session_id for experience in experiences if experience.reward is not None}
        lost = _uncounted(seen, await _read(up, Trajectory), await _read(up, Reward))
        if (rewarded.issuperset(seen.friend_sessions) and not lost) or time.monotonic() > deadline:
            return experiences, lost
        await asyncio.sleep(3)


def _uncounted(seen: Observations, trajectories: list[Trajectory], rewards: list[Reward]) -> list[str]:
    """Return each acknowledged feedback value about one turn of a closed trajectory that became no reward of the
    trajectory.

    A gateway does not know all ids, so it acknowledges feedback about another tenant's turn, which must not become a
    reward. An id that no gateway generated names no session; feedback about such an id alone is dead-lettered as
    `unknown_target`.
    """
    hostile = [trajectory for trajectory in trajectories if trajectory.tenant == "mallory"]
    trajectory_of = {turn: trajectory.trajectory_id for trajectory in hostile for turn in trajectory.turn_ids}
    sources = defaultdict(set)
    for reward in rewards:
        sources[reward.trajectory_id].add(reward.source)
    times = Counter(str(body.get("feedback_id")) for body in seen.acknowledged)
    lost = []
    for body in seen.acknowledged:
        if "feedback_id" in body and times[str(body["feedback_id"])] > 1:
            continue  # equal ids are one feedback
        response_id = str(body.get("response_id"))
        trajectory = trajectory_of.get(response_id)
        if trajectory is None or ids.key_of_response(response_id) is None or body.get("withdrawn"):
            continue
        source = str(body.get("source", "feedback"))  # the gateway takes numbers as labels
        metrics = (
            list(body.get("parts") or ()) or [body["metric"]] if body.get("metric") or body.get("parts") else [None]
        )
        if body.get("value") is None and body.get("rating") is None and not body.get("parts"):
            continue
        for metric in metrics:
            source_name = source if metric is None else f"{source}:{metric}"
            if source_name not in sources[trajectory]:
                lost.append(f"no reward of {source_name!r} for {trajectory} after {to_bytes(body)[:200]!r}")
    return lost


async def _read(up: HeadraceUp, kind: type[Any]) -> list[Any]:
    """Return all events of type `kind` that can be read from their topic."""
    async with connected(up.state.bus) as topics:
        events: list[Event] = [entry.event async for entry in topics.read(Range(kind.topic)) if entry.event is not None]
    return events
