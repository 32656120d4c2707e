"""1,000 versions that are not what they say, given to a replica with real weights; and checks that are left out."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

from headrace_inference import fleet as fleets
from headrace_inference.errors import UnknownVersion
from headrace_inference.fleet import Fleet, FleetLimits
from headrace_inference.settings import TorchSettings
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_runtime.versions import VersionCache
from headrace_schemas import Routing, ServedVersion
from headrace_schemas.base import utcnow
from tests.rollouts.spoiled import FORMS, Spoiled, Workshop, sound
from tests.unit.inference.conftest import Models, make_models

_WAIT_S = 120.0
_PLANTED = 6
Planted = Callable[[], AbstractContextManager[Any]]
LEFT_OUT: dict[str, tuple[Planted, tuple[str, ...]]] = {
    "nobody judges a probe": (
        lambda: mock.patch.object(fleets, "_judge", return_value=None),
        ("wrong adapter", "stale parent", "adapter not applied"),
    ),
    "nobody compares tokens": (
        lambda: mock.patch.object(Fleet, "_check", return_value=None),
        ("tokenizer", "template"),
    ),
}
"""Faults of the replica itself that the same injections find, and which of them do."""


class Inspected:
    """A replica's fleet with the parent loaded."""

    def __init__(self, models: Models, cache: Path) -> None:
        self._models = models
        self._cache = cache
        self._news = asyncio.Event()
        self._engine = TorchEngine(TorchSettings(device="cpu", threads=1))
        limits = FleetLimits(versions_max=8, drain_s=0.0, retry_s=0.01)
        self._fleet = Fleet(self._engine, VersionCache(models.blobs, cache), limits, self._news.set)
        self._revision = 0

    async def stop(self) -> None:
        await self._fleet.close()
        await self._engine.stop()

    async def serves(self, served: ServedVersion, *others: ServedVersion) -> str | None:
        """None when it is ready and found, else why it is not. It is gone afterwards."""
        try:
            self._route(self._models.first.served, *others, served)
            await self._until(lambda: self._state(served) in ("ready", "failed"))
            if self._state(served) == "ready":
                self._fleet.find(served.version)
                return None
            with contextlib.suppress(UnknownVersion):
                self._fleet.find(served.version)
                return None
            held = served.version in self._engine._models
            assert not held, f"{served.version} was refused, and the engine holds it"
            return next(one.error or "" for one in self._fleet.versions() if one.version == served.version)
        finally:
            await self._alone()
            for one in (served, *others):  # what was once whole here needs no store
                await asyncio.to_thread(shutil.rmtree, self._cache / one.version, ignore_errors=True)

    async def _alone(self) -> None:
        only = [self._models.first.version]
        self._route(self._models.first.served)
        await self._until(lambda: [*self._states()] == only and [*self._engine._models] == only)

    def _route(self, *serve: ServedVersion) -> None:
        self._revision += 1
        about = {"time": utcnow(), "model": "tiny", "revision": self._revision, "aliases": {}, "serve": serve}
        self._fleet.follow([Routing.model_validate(about)])

    def _states(self) -> dict[str, str]:
        return {one.version: one.state for one in self._fleet.versions()}

    def _state(self, served: ServedVersion) -> str | None:
        return self._states().get(served.version)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(_WAIT_S):
            while not condition():
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), 0.05)


@contextlib.asynccontextmanager
async def inspected(models: Models, cache: Path) -> AsyncIterator[Inspected]:
    replica = Inspected(models, cache)
    try:
        yield replica
    finally:
        await replica.stop()


async def served_of(replica: Inspected, made: list[Spoiled]) -> list[str]:
    """Those that a user could have met."""
    found = []
    for one in made:
        with one.planted():
            if await replica.serves(one.served, *one.needs) is None:
                found.append(f"{one.served.version} is served: {one.about}")
    return found


async def lines(folder: Path, count: int, draw: random.Random) -> list[dict[str, Any]]:
    """One for each form of fault, one for sound versions, one for each check that is left out."""
    models = await asyncio.to_thread(make_models, folder)
    shop = Workshop(models, draw)
    found: list[dict[str, Any]] = []
    async with inspected(models, folder / "cache") as replica:
        refused = [why for one in sound(models) if (why := await replica.serves(one)) is not None]
        found.append({"name": "sound versions are served", "holds": not refused, "problems": refused})
        for form, (make, part) in FORMS.items():
            number = round(count * part)
            served = await served_of(replica, [make(shop) for _ in range(number)])
            found.append(
                {"name": f"refused: {form}", "injected": number, "served": len(served), "holds": not served,
                 "problems": served[:5]}
            )  # fmt: skip
        for name, (planted, forms) in LEFT_OUT.items():
            with planted():
                made = [FORMS[form][0](shop) for form in forms for _ in range(_PLANTED)]
                served = await served_of(replica, made)
            found.append({"name": f"found: {name}", "served": len(served), "holds": bool(served), "problems": []})
    return found
