"""Forged heartbeats of replicas, and hostile trajectories at both doors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import httpx2
from pydantic import SecretStr

from headrace_operations.from_topics import read_turn_account
from headrace_runtime.http.guard import sign_replica
from headrace_runtime.settings.sections import SecuritySettings
from headrace_schemas import DeadLetter, Experience, Replica, Routing
from headrace_schemas.events.routing import ServedVersion
from headrace_schemas.values import ids
from headrace_schemas.values.base import utcnow
from headrace_schemas.values.blobs import File, Fingerprint, Manifest
from tests.attack.program import attack
from tests.attack.stacks import Place, SmallStack, beside, small_stack
from tests.support.fake_replica import VERSION, FakeReplica
from tests.support.gateway import routing
from tests.support.servers import BrokerProcess
from tests.support.service_process import BusView, GatewayProcess, ServiceProcess, bus_view, wait_healthy
from tests.support.turns import ask, end, user
from tests.system.program import Line, none_of

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


@attack("one turn in four trajectories, and hostile fields at both doors")
async def trajectory_door(folder: Path, rng: random.Random) -> list[Line]:
    """Ingest the same turn in several trajectories, and wrong values of every field, over HTTP and Kafka."""
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


RECORDS = 1000
CALLS = 40
LISTENERS = 4
_BEAT_S = 0.5


@dataclass
class Trap:
    """Listener of the attacker. It answers like a working replica, so that calls stay with it."""

    connections: int = 0
    received_parts: list[bytes] = field(default_factory=list)
    port: int = 0

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Trap]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        async with server:
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(5):
                self.received_parts.append(await reader.read(65_536))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                await writer.drain()
        writer.close()


@attack("forged replicas on the bus: no key leaves, no request goes astray")
async def forged_replicas(folder: Path, rng: random.Random) -> list[Line]:
    """Forge `replicas` records that name the attacker's listeners, which must receive no key and no prompt."""
    key = rng.randbytes(16).hex()
    security = SecuritySettings(internal_key=SecretStr(key))
    broker = BrokerProcess(folder / "broker")
    await asyncio.to_thread(broker.start)
    gateway = GatewayProcess(folder / "data", broker.address, SECURITY__INTERNAL_KEY=f'"{key}"')
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(broker.stop)
        traps = [await stack.enter_async_context(Trap().listening()) for _ in range(LISTENERS)]
        replica = await stack.enter_async_context(FakeReplica().running())
        view = await stack.enter_async_context(bus_view(broker.address, folder / "data"))
        await view.producer.send(routing(VERSION))
        await stack.enter_async_context(beside(_beat(view, replica, security)))
        await asyncio.gather(*(view.producer.send(_forged(replica, traps, rng)) for _ in range(RECORDS // 2)))
        stack.callback(gateway.stop)
        await asyncio.to_thread(gateway.start)
        await asyncio.to_thread(wait_healthy, gateway.url)
        before = await _failed_calls(gateway.url)
        await asyncio.gather(*(view.producer.send(_forged(replica, traps, rng)) for _ in range(RECORDS // 2)))
        during = await _failed_calls(gateway.url)
        await asyncio.sleep(3.0)  # health checks of replicas that are silent come after two seconds
        received = b"".join(part for trap in traps for part in trap.received_parts)
        return [
            none_of("connections to an address that a forged record names", sum(t.connections for t in traps), RECORDS),
            none_of("requests at such an address with the internal key", received.count(key.encode()), RECORDS),
            none_of("calls that failed", before + during, 2 * CALLS),
            Line("calls that the genuine replica served", str(len(replica.requests)), f"{2 * CALLS}",
                 len(replica.requests) == 2 * CALLS),
        ]  # fmt: skip


def _forged(replica: FakeReplica, traps: list[Trap], rng: random.Random) -> Replica:
    """Return a forged heartbeat that a caller without the key can write, under the replica's own or another name."""
    host = rng.choice(("127.0.0.1", "localhost", "[::ffff:127.0.0.1]"))
    name = rng.choice((replica.replica_id, f"replica-{rng.randrange(50)}"))
    wrong = SecuritySettings(internal_key=SecretStr(rng.randbytes(8).hex()))
    beat = replica.heartbeat(replica_id=name, url=f"http://{host}:{rng.choice(traps).port}", capacity=10_000)
    return rng.choice((beat, sign_replica(beat, wrong), beat.model_copy(update={"signature": rng.randbytes(32).hex()})))


async def _failed_calls(url: str) -> int:
    async with httpx2.AsyncClient(timeout=30) as http:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "a prompt of somebody's"}]}
        answers = await asyncio.gather(*(http.post(f"{url}/v1/chat/completions", json=body) for _ in range(CALLS)))
    return sum(answer.status_code != 200 for answer in answers)


async def _beat(view: BusView, replica: FakeReplica, security: SecuritySettings) -> None:
    while True:
        await view.producer.send(sign_replica(replica.heartbeat(), security))
        await asyncio.sleep(_BEAT_S)
