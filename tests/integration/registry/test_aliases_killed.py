"""Tests of two registries, one of which is repeatedly killed while aliases move.

Two aliases that move together are never seen half moved, one of several concurrent moves wins, and the bus agrees with
the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.integration.registry.rig import RegistryRig
from tests.support import tiny_model
from tests.support.broker_process import BrokerProcess

MODEL = "opponent"
KILLS = 4
pytestmark = pytest.mark.long


@pytest.fixture
def own_bus(tmp_path: Path) -> Iterator[str]:
    broker = BrokerProcess(tmp_path / "broker")
    broker.start()
    yield broker.address
    broker.stop()


class Pair:
    """Two registries. `ask` calls the leader."""

    def __init__(self, rig: RegistryRig, http: httpx2.AsyncClient) -> None:
        self._rig = rig
        self._http = http
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        process, url = self._rig.registry()
        self.processes[url] = process

    async def ask(self, path: str, body: object) -> httpx2.Response | None:
        """Return the leader's response, or None without a leader or if it died during the call.

        A call that was interrupted may have taken effect.
        """
        for url in list(self.processes):
            with contextlib.suppress(httpx2.TransportError):
                answer = await self._http.post(f"{url}/v1/{path}", json=body)
                if answer.status_code != 503:
                    return answer
        return None

    async def answered(self, path: str, body: object) -> httpx2.Response:
        """Wait for a leader, and return its response."""
        while True:
            answer = await self.ask(path, body)
            if answer is not None:
                return answer
            await asyncio.sleep(0.1)

    async def aliases(self) -> dict[str, str]:
        while True:
            for url in list(self.processes):
                with contextlib.suppress(httpx2.TransportError):
                    answer = await self._http.get(f"{url}/v1/models/{MODEL}")
                    if answer.status_code == 200:
                        aliases: dict[str, str] = answer.json()["aliases"]
                        return aliases
            await asyncio.sleep(0.05)

    async def kill_one(self, chance: random.Random) -> None:
        """Kill one of the two registries at random, and start another one."""
        url = chance.choice(sorted(self.processes))
        process = self.processes.pop(url)
        process.kill()
        await asyncio.to_thread(process.wait)
        self.start()


async def registered(rig: RegistryRig, pair: Pair, content: str) -> str:
    manifest, ref = tiny_model.version(rig.blobs, MODEL, content, lineage="registered")
    body = {"manifest": ref.model_dump()}
    answer = await pair.answered(f"models/{MODEL}/register", body)
    assert answer.status_code == 201, answer.text
    return manifest.version


async def move(pair: Pair, versions: list[str], chance: random.Random, moved: list[int]) -> None:
    """Move two aliases from their observed versions to others in an endless loop. No observation may be half moved."""
    while True:
        seen = await pair.aliases()
        assert seen["blue"] == seen["green"], seen
        target = chance.choice([version for version in versions if version != seen["blue"]])
        moves = {name: {"version": target, "expected": seen[name]} for name in ("blue", "green")}
        answer = await pair.ask(f"models/{MODEL}/aliases", {"moves": moves})
        if answer is not None:
            assert answer.status_code in (200, 409), answer.text
            moved[answer.status_code == 409] += 1


async def test_a_pair_of_aliases_is_never_half_moved(own_bus: str, tmp_path: Path, database_url: str) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    rig = RegistryRig(own_bus, tmp_path / "rig", database_url)
    async with rig.open(), httpx2.AsyncClient(timeout=10) as http:
        pair = Pair(rig, http)
        pair.start()
        pair.start()
        versions = [await registered(rig, pair, f"v{n}") for n in range(3)]
        first = {name: {"version": versions[0], "expected": None} for name in ("blue", "green")}
        await pair.answered(f"models/{MODEL}/aliases", {"moves": first})
        moved = [0, 0]
        movers = [asyncio.create_task(move(pair, versions, random.Random(seed + n), moved)) for n in range(3)]
        for _ in range(KILLS):
            before = moved[0]
            await rig.until(lambda before=before: moved[0] > before + 5, "moves", 60)  # type: ignore[misc]
            await pair.kill_one(chance)
        before = moved[0]
        await rig.until(lambda: moved[0] > before + 5, "moves after the last kill", 60)
        for mover in movers:
            mover.cancel()
        ended = await asyncio.gather(*movers, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in ended), ended
        last = await pair.aliases()
        await rig.until(lambda: rig.routing.rows[MODEL].names == last, "the bus to say so", 30)
        assert moved[1] > 0, "some came second, and were told"
