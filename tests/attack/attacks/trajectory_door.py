"""Ingested trajectories over HTTP and Kafka: the same turn in several trajectories, and wrong values of every field."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from headrace_operations.from_topics import read_turn_account
from headrace_schemas import DeadLetter, Experience, Routing
from headrace_schemas.events.routing import ServedVersion
from headrace_schemas.values import ids
from headrace_schemas.values.base import utcnow
from headrace_schemas.values.blobs import File, Fingerprint, Manifest
from tests.attack.stacks import Place, SmallStack, small_stack
from tests.support.service_process import ServiceProcess
from tests.support.turns import ask, end, user
from tests.system.program import Line, none_of

TITLE = "one turn in four trajectories, and hostile fields at both doors"
MODEL = "m"
VOCABULARY = 100
TURNS = 10
ANOTHERS = "chatcmpl-" + "a" * 16 + "-" + "0" * 32

HOSTILE: dict[str, tuple[str, dict[str, Any]]] = {
    "unknown model": ("unknown_model", {"model": "nobody"}),
    "unknown version": ("unknown_version", {"version": f"{MODEL}@{'0' * 16}"}),
    "id beyond the vocabulary": ("unknown_token", {"token_ids": [1, 2, 3, 4, VOCABULARY]}),
    "ends before it begins": (
        "impossible_time",
        {"time": "2026-01-01T00:00:00Z", "started_at": "2026-01-02T00:00:00Z"},
    ),
    "year 9999": ("impossible_time", {"time": "9999-01-01T00:00:00Z", "started_at": "9999-01-01T00:00:00Z"}),
    "the collector's end_reason": ("foreign_end_reason", {"end_reason": "end_call"}),
    "foreign session key": ("foreign_session_key", {"session_key": "a" * 16}),
    "a captured turn": ("captured_turn", {"turn_id": ANOTHERS}),
    "unknown field": ("unknown_field", {"priority": 1}),
}
"""Hostile changes by name: the reason for which the ingest check must refuse the trajectory, and the changed fields."""


async def attack(folder: Path, rng: random.Random) -> list[Line]:
    async with small_stack(folder) as stack:
        version = await _publish_model(stack)
        gateway, scorer = stack.service("gateway"), stack.service("scorer", SCORER__REWARD_WAIT_S=1)
        collector = stack.service("collector")
        for service in (gateway, scorer, collector):
            service.start(ready=service is not gateway)
        await _answers(gateway)
        refused_http = await _hostile_http(gateway, version)
        offsets = await _hostile_kafka(stack, version)
        await _captured(stack, version)
        await _repeat(stack, gateway, version, rng)
        experiences = await stack.until(
            Experience, lambda events: len({event.turn_ids for event in events}) >= TURNS + 1
        )
        letters = await stack.until(DeadLetter, lambda events: len(events) >= len(HOSTILE) + 3 * TURNS)
        reasons = {(event.source_topic, event.source_partition, event.source_offset): event.reason for event in letters}
        refused_kafka = [name for name, (offset, reason) in offsets.items() if reasons.get(offset) == reason]
        owners = Counter(
            turn for name in {event.trajectory_id for event in experiences} for turn in _turns(experiences, name)
        )
        account = await read_turn_account(stack.bus)
        return [
            none_of("hostile fields that HTTP did not refuse by name", len(HOSTILE) - len(refused_http), len(HOSTILE)),
            none_of(
                "hostile fields that Kafka did not refuse by name", len(HOSTILE) - len(refused_kafka), len(HOSTILE)
            ),
            none_of("turns that no trajectory went on with", TURNS + 1 - len(owners), TURNS + 1),
            none_of("turns that two trajectories went on with", sum(count > 1 for count in owners.values()), TURNS + 1),
            Line("the account adds up", "; ".join(account.problems[:2]) or "it does", "it does", account.consistent),
        ]


def _turns(experiences: list[Experience], trajectory: str) -> set[str]:
    return {
        turn for experience in experiences if experience.trajectory_id == trajectory for turn in experience.turn_ids
    }


def _trajectory(name: str, **changes: Any) -> dict[str, Any]:
    span = {
        "start": 2,
        "logprobs": [-0.5, -0.25, -0.125],
        "turn_id": changes.pop("turn_id", f"{name}-1"),
        "version": changes.pop("version"),
    }
    now = utcnow().isoformat()
    return {
        "trajectory_id": name,
        "session_id": name,
        "session_key": ids.session_key("default", name),
        "model": MODEL,
        "branches": [{"token_ids": changes.pop("token_ids", [1, 2, 3, 4, 5]), "spans": [span]}],
        "end_reason": "ingest",
        "time": now,
        "started_at": now,
        **changes,
    }


async def _publish_model(stack: SmallStack) -> str:
    """Publish a model with one version, as the registry would. Its weights are never read."""
    config = stack.blobs.put(json.dumps({"vocab_size": VOCABULARY}).encode())
    manifest = Manifest(
        name=MODEL,
        lineage="l",
        step=0,
        files=(File(path="config.json", blob=config),),
        fingerprint=Fingerprint(token_ids=(1, 2), logprobs=(-1.0,)),
        tokenizer_sha256="0" * 64,
        template_sha256="0" * 64,
    )
    served = ServedVersion(version=manifest.version, manifest=stack.blobs.put(manifest.canonical_json()))
    aliases = {"champion": served.version}
    routing = Routing.model_validate(
        {"time": utcnow(), "model": MODEL, "revision": 1, "aliases": aliases, "serve": [served.model_dump()]}
    )
    await stack.send(routing)
    return served.version


async def _answers(gateway: ServiceProcess) -> None:
    for _ in range(300):
        if gateway.healthy():
            return
        await asyncio.sleep(0.2)
    raise AssertionError(f"the gateway does not answer: {gateway.log[-2000:]}")


async def _hostile_http(gateway: ServiceProcess, version: str) -> list[str]:
    """Return the hostile changes that were refused with their reason."""
    wrong = []
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for number, (label, (reason, changes)) in enumerate(HOSTILE.items()):
            body = _trajectory(f"http-{number}", **{"version": version, **changes})
            answer = await client.post("/v1/trajectories", json=body)
            error = answer.json().get("error", {})
            named = error.get("code") in (reason, "invalid_value") and error.get("param")
            if 400 <= answer.status_code < 500 and named:
                wrong.append(label)
    return wrong


async def _hostile_kafka(stack: SmallStack, version: str) -> dict[str, tuple[Place, str]]:
    offsets = {}
    for number, (label, (reason, changes)) in enumerate(HOSTILE.items()):
        body = _trajectory(f"kafka-{number}", **{"version": version, **changes})
        value = json.dumps(body).encode()
        offsets[label] = (await stack.send_raw("trajectories", body["session_key"], value), reason)
    return offsets


async def _captured(stack: SmallStack, version: str) -> None:
    """Send a captured turn and its session's end, then a trajectory of another tenant that contains the same turn."""
    turn = ask([user("q")], session="real", version=version)
    await stack.send(turn)
    await stack.send(end("real"))
    key = ids.session_key("other", "real")
    body = _trajectory(
        "stolen", version=version, turn_id=turn.turn_id, tenant="other", session_id="real", session_key=key
    )
    await stack.send_raw("trajectories", key, json.dumps(body).encode())


async def _repeat(stack: SmallStack, gateway: ServiceProcess, version: str, rng: random.Random) -> None:
    """Send each turn in four trajectories, in random order, over HTTP or Kafka."""
    work = [(turn, copy) for turn in range(TURNS) for copy in range(4)]
    rng.shuffle(work)
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for turn, copy in work:
            body = _trajectory(f"t{turn}-{copy}", version=version, turn_id=f"turn-{turn}")
            if rng.random() < 0.5:
                (await client.post("/v1/trajectories", json=body)).raise_for_status()
            else:
                await stack.send_raw("trajectories", body["session_key"], json.dumps(body).encode())
