"""Tests of registries as processes on a real bus: a version's life, kill -9, a standby, and aliases that move.

Two aliases that move together are never seen half moved, one of several concurrent moves wins, and the bus agrees with
the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
from pathlib import Path

import httpx2
import pytest

from headrace_runtime.kafka.wire import Outgoing
from headrace_schemas import Checkpoint
from tests.integration.conftest import RegistryRig
from tests.support import servers, tiny_model
from tests.support.presence import draw_seed
from tests.support.processes import is_open

MODEL = "opponent"
KILLS = 4


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


@pytest.mark.long
async def test_a_pair_of_aliases_is_never_half_moved(empty_bus: str, tmp_path: Path, database_url: str) -> None:
    seed = draw_seed()
    chance = random.Random(seed)
    rig = RegistryRig(empty_bus, tmp_path / "rig", database_url)
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


@pytest.mark.long
async def test_promotion_survives_kill_9_in_the_middle_of_the_gate(module_bus: str, tmp_path: Path) -> None:
    rig = RegistryRig(module_bus, tmp_path)
    async with rig.open():
        process, url = rig.registry()
        first = await rig.publish("life", 0)
        await rig.until(lambda: rig.champion("life") == first, "the first champion")
        await rig.until(lambda: "evaluated" in rig.decisions_about(first), "its baseline")
        (tmp_path / "hold").touch()
        second = await rig.publish("life", 1, {"t": 0.75})
        await rig.until(lambda: set(rig.runs()[1:]) & {first, second}, "the trial's start")
        process.kill()
        process.wait()
        assert rig.champion("life") == first
        (tmp_path / "hold").unlink()
        await rig.producer.send_raw([Outgoing(Checkpoint.topic, b"life", b"{poison", ())])
        _, url = rig.registry()
        await rig.until(lambda: rig.champion("life") == second, "the second champion")
        assert len(rig.runs()) >= 4, "the trial is begun anew"
        await rig.until(lambda: rig.decisions_about(second)[-1] == "evaluated", "its audit")
        assert rig.decisions_about(second) == ["registered", "probed", "promoted", "evaluated"], "each once"
        async with httpx2.AsyncClient(base_url=url, timeout=10) as http:
            assert (await http.get("/v1/models/life")).json()["champion"] == second
            assert (await http.get("/health")).status_code == 200
            answer = await http.post("/v1/models/life/rollback")
            assert answer.json()["champion"] == first
        await rig.until(lambda: rig.champion("life") == first, "the rollback on the bus")


async def test_a_published_version_is_decided_at_once_and_not_at_the_next_poll(module_bus: str, tmp_path: Path) -> None:
    rig = RegistryRig(module_bus, tmp_path)
    rig.set({"HEADRACE_REGISTRY__POLL_S": "3600"})
    async with rig.open():
        rig.registry()
        first = await rig.publish("prompt", 0)
        await rig.until(lambda: "evaluated" in rig.decisions_about(first), "the first version's audit")
        second = await rig.publish("prompt", 1, {"t": 0.75})
        await rig.until(lambda: rig.champion("prompt") == second, "the second champion")


@pytest.mark.postgres
async def test_a_standby_takes_over_from_a_killed_leader(
    module_bus: str, tmp_path: Path, postgres: servers.PostgresNode
) -> None:
    rig = RegistryRig(module_bus, tmp_path, postgres.empty_url())
    model = "standby"
    async with rig.open(), httpx2.AsyncClient(timeout=10) as http:
        processes = {url: process for process, url in (rig.registry(), rig.registry())}
        first = await rig.publish(model, 0)
        await rig.until(lambda: rig.champion(model) == first, "the first champion")
        await rig.until(lambda: all(is_open(httpx2.URL(url).port or 0) for url in processes), "both of them")
        answers = {url: await _leader(http, url) for url in processes}
        assert sorted(answers.values()) == ["model_not_found", "not_leader"]
        (leader,) = (processes[url] for url, code in answers.items() if code == "model_not_found")
        (standby,) = (url for url, code in answers.items() if code == "not_leader")
        assert (await http.get(f"{standby}/v1/models/{model}")).json()["champion"] == first
        leader.kill()
        leader.wait()
        second = await rig.publish(model, 1)
        await rig.until(lambda: rig.champion(model) == second, "the second champion")
        await rig.until(lambda: "promoted" in rig.decisions_about(second), "its events, which are another topic's")
        assert rig.decisions_about(second)[:3] == ["registered", "probed", "promoted"]


async def _leader(http: httpx2.AsyncClient, url: str) -> str:
    """Return the error code for an unknown model: only the leader looks up the model, a standby refuses first."""
    answer = await http.post(f"{url}/v1/models/nobody/rollback")
    code: str = answer.json()["error"]["code"]
    return code
