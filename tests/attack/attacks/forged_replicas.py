"""A thousand forged `replicas` records that name the attacker's listeners, which must receive no key and no prompt."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
from pydantic import SecretStr

from headrace_runtime.http.guard import sign_replica
from headrace_runtime.settings.sections import SecuritySettings
from headrace_schemas import Replica
from tests.support.fake_replica import VERSION, FakeReplica
from tests.support.gateway import routing
from tests.support.servers import BrokerProcess
from tests.support.service_process import BusView, GatewayProcess, bus_view, wait_healthy
from tests.system.program import Line, none_of

TITLE = "forged replicas on the bus: no key leaves, no request goes astray"
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


async def attack(folder: Path, rng: random.Random) -> list[Line]:
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
        await stack.enter_async_context(_beating(view, replica, security))
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


@contextlib.asynccontextmanager
async def _beating(view: BusView, replica: FakeReplica, security: SecuritySettings) -> AsyncIterator[None]:
    async def beat() -> None:
        while True:
            await view.producer.send(sign_replica(replica.heartbeat(), security))
            await asyncio.sleep(_BEAT_S)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
