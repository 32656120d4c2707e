"""A rollback that must be final although a trainer continues from the withdrawn weights and the registry dies
meanwhile.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx2

from headrace_schemas import Routing
from tests.integration.registry.rig import RegistryRig
from tests.support.servers import BrokerProcess
from tests.system.program import Line, none_of

TITLE = "descendants of a withdrawn version never serve"
ROUNDS = 12
LATER_S = 5.0
"""Seconds to wait for a promotion of a descendant, which must not happen; five were enough for the bug to show."""
MODEL = "rolled"


async def attack(folder: Path, rng: random.Random) -> list[Line]:
    broker = BrokerProcess(folder / "broker")
    broker.start()
    try:
        return await _play(RegistryRig(broker.address, folder), rng)
    finally:
        broker.stop()


async def _play(rig: RegistryRig, rng: random.Random) -> list[Line]:
    served: list[Routing] = []
    parents: dict[str, str | None] = {}
    barred: set[str] = set()

    def all_taken_back() -> bool:
        return all(_taken_back(rig, name) for name in barred)

    async with rig.open(), httpx2.AsyncClient(timeout=20) as http:
        watching = asyncio.create_task(_watch(rig, served))
        process, url = rig.registry()
        champion = await rig.publish(MODEL, 0)
        parents[champion] = None
        await rig.until(lambda: rig.champion(MODEL) == champion, "the first champion")
        for turn in range(ROUNDS):
            bad = await _promoted(rig, parents, champion)
            early = [await _publish(rig, parents, bad)] if rng.random() < 0.7 else []
            await asyncio.sleep(rng.random() * 0.5)
            answer = await http.post(f"{url}/v1/models/{MODEL}/rollback", json={"reason": "worse"})
            answer.raise_for_status()
            champion = answer.json()["champion"]
            if turn % 4 == 3:
                process.kill()
                process.wait()
                process, url = rig.registry()
            withdrawn = [
                version for version in (bad, *early) if version != champion
            ]  # `bad` serves if its child was promoted first
            barred |= {*withdrawn, *[await _publish(rig, parents, parent) for parent in withdrawn]}
            await rig.until(all_taken_back, "the children are withdrawn")
        await asyncio.sleep(LATER_S)
        watching.cancel()
    wrong = [version for version in served if set(version.aliases.values()) & _barred_then(version, parents)]
    return [
        none_of("routings that name a descendant of a withdrawn version", len(wrong), len(served)),
        none_of("barred versions that were promoted", sum(_after(rig, name) for name in barred), len(barred)),
    ]


async def _promoted(rig: RegistryRig, parents: dict[str, str | None], champion: str) -> str:
    version = await _publish(rig, parents, champion, score=1.0)
    await rig.until(lambda: rig.champion(MODEL) == version, f"{version} is champion")
    return version


async def _publish(rig: RegistryRig, parents: dict[str, str | None], parent: str, score: float = 1.0) -> str:
    version = await rig.publish(MODEL, len(parents), {"t": score}, parent)
    parents[version] = parent
    return version


def _descends(version: str, ancestor: str, parents: dict[str, str | None]) -> bool:
    name: str | None = version
    while name is not None and name != ancestor:
        name = parents.get(name)
    return name == ancestor


def _barred_then(routing: Routing, parents: dict[str, str | None]) -> set[str]:
    """Return the versions that `routing` withdraws, and their descendants."""
    return {name for name in parents if any(_descends(name, version, parents) for version in routing.withdrawn)}


def _taken_back(rig: RegistryRig, version: str) -> bool:
    return not {"rolled_back", "withdrawn"}.isdisjoint(rig.decisions_about(version))


def _after(rig: RegistryRig, version: str) -> bool:
    """Return whether the version was promoted after its rollback or withdrawal."""
    answer = rig.decisions_about(version)
    return "promoted" in answer[min(answer.index(word) for word in ("rolled_back", "withdrawn") if word in answer) :]


async def _watch(rig: RegistryRig, served: list[Routing]) -> None:
    while True:
        routing = rig.routing.rows.get(MODEL)
        if routing is not None and (not served or served[-1] != routing):
            served.append(routing)
        await asyncio.sleep(0.005)
