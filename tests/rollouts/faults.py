"""1,000 versions whose content differs from their manifest, given to a replica with weights; omitted checks."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from headrace_inference import fleet as fleets
from headrace_inference.errors import UnknownVersion
from headrace_inference.fleet import Fleet, FleetLimits
from headrace_inference.settings import TorchSettings
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_runtime.storage.versions import VersionCache
from headrace_schemas import Routing, ServedVersion
from headrace_schemas.values.base import utcnow
from tests.rollouts.spoiled import FORMS, Spoiled, Workshop, sound
from tests.system.line import Line, caught, no_problems
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

    async def serves(self, served: ServedVersion, *dependencies: ServedVersion) -> str | None:
        """Return None when the version becomes ready, else the reason. The version is removed afterwards."""
        try:
            self._route(self._models.first.served, *dependencies, served)
            await self._until(lambda: self._state(served) in ("ready", "failed"))
            if self._state(served) == "ready":
                self._fleet.find(served.version)
                return None
            with contextlib.suppress(UnknownVersion):
                self._fleet.find(served.version)
                return None
            loaded_before = served.version in self._engine._models
            assert not loaded_before, f"{served.version} was refused, and the engine holds it"
            return next(version.error or "" for version in self._fleet.versions() if version.version == served.version)
        finally:
            await self._alone()
            for version in (served, *dependencies):  # what was once whole here needs no store
                await asyncio.to_thread(shutil.rmtree, self._cache / version.version, ignore_errors=True)

    async def _alone(self) -> None:
        only = [self._models.first.version]
        self._route(self._models.first.served)
        await self._until(lambda: [*self._states()] == only and [*self._engine._models] == only)

    def _route(self, *serve: ServedVersion) -> None:
        self._revision += 1
        about = {"time": utcnow(), "model": "tiny", "revision": self._revision, "aliases": {}, "serve": serve}
        self._fleet.follow([Routing.model_validate(about)])

    def _states(self) -> dict[str, str]:
        return {version.version: version.state for version in self._fleet.versions()}

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


async def served_faults(replica: Inspected, spoiled_versions: list[Spoiled]) -> list[str]:
    """Return a sentence for each spoiled version that a user could have met."""
    sentences = []
    for spoiled in spoiled_versions:
        with spoiled.planted():
            if await replica.serves(spoiled.served, *spoiled.needs) is None:
                sentences.append(f"{spoiled.served.version} is served: {spoiled.about}")
    return sentences


async def lines(folder: Path, count: int, draw: random.Random) -> list[Line]:
    """Return a line for sound versions, one for each form of fault, and one for each check that is left out."""
    models = await asyncio.to_thread(make_models, folder)
    shop = Workshop(models, draw)
    async with inspected(models, folder / "cache") as replica:
        refusals = [refusal for version in sound(models) if (refusal := await replica.serves(version)) is not None]
        measured = [no_problems("sound versions are served", refusals)]
        for form, (make, share) in FORMS.items():
            number = round(count * share)
            served = await served_faults(replica, [make(shop) for _ in range(number)])
            line = no_problems(f"versions that are served with: {form}", served)
            measured.append(replace(line, details={**line.details, "injected": number}))
        for name, (planted, forms) in LEFT_OUT.items():
            with planted():
                spoiled = [FORMS[form][0](shop) for form in forms for _ in range(_PLANTED)]
                served = await served_faults(replica, spoiled)
            measured.append(caught(name, by_the_suite=bool(served)))
    return measured
