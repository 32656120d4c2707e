"""Fixtures for the registry: a started rig, or the tables alone; and a transition in one transaction with two
models, so that tests can check that the rows of the other model do not change."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.control import steps as rollouts
from headrace_registry.rollouts.plan import RolloutPlan
from headrace_registry.storage import store
from headrace_registry.storage.records import CHAMPION_IS_ANCHOR, ModelRecord, VersionRecord
from headrace_registry.storage.tables import METADATA
from headrace_registry.versions.transition import Transition
from headrace_schemas import Checkpoint, ModelEvent, Routing
from headrace_schemas.values.blobs import Manifest
from tests.unit.registry.rig import MODEL, Rig

OTHER = "other"
NOBODY = "m@0123456789ab"


class RegistryState:
    """Transition in an open transaction, with helpers to add rows and to read the tables."""

    def __init__(self, rig: Rig, tx: AsyncConnection) -> None:
        self._rig = rig
        self.tx = tx
        self.transition = Transition(tx, rig.clock.now())

    def checkpoint(
        self, step: int, parent: str | None = None, model: str = MODEL, base: str | None = None
    ) -> tuple[Checkpoint, Manifest]:
        base_manifest, ref = self._rig.manifest(step, parent=parent, base=base)
        manifest = base_manifest.model_copy(update={"name": model})
        event = Checkpoint(
            time=self._rig.clock.now(),
            model=model,
            version=manifest.version,
            lineage="main",
            step=step,
            parent=parent,
            manifest=ref,
        )
        return event, manifest

    async def add(self, step: int, parent: str | None = None, model: str = MODEL) -> str:
        event, manifest = self.checkpoint(step, parent, model)
        await self.transition.register(event, manifest, None)
        return event.version

    async def promote_in_turn(self, *steps: int, model: str = MODEL) -> list[str]:
        """Add versions for `steps`, each trained from the previous one, promote them in order, and return them."""
        line: list[str] = []
        for step in steps:
            line.append(await self.add(step, line[-1] if line else None, model))
            await self.transition.promote(await self.model(model), line[-1], "better", {})
        return line

    async def roll_out(self, step: int, slots: int = 2) -> str:
        """Add a new version, begin its rollout, and return the version."""
        name = await self.add(step)
        plan = RolloutPlan(slots=slots)
        await rollouts.begin(
            self.transition,
            await self.model(),
            name,
            "canary",
            plan,
            anchor_state=CHAMPION_IS_ANCHOR,
            reason="better",
            statistics={},
        )
        return name

    async def model(self, name: str = MODEL) -> ModelRecord:
        record = await store.load_model(self.tx, name)
        assert record
        return record

    async def version(self, name: str) -> VersionRecord:
        record = await store.load_version(self.tx, name)
        assert record
        return record

    async def states(self, *names: str) -> list[str]:
        return [(await self.version(name)).state for name in names]

    async def routings(self) -> list[Routing]:
        return [event for event in await self.transition.finish() if isinstance(event, Routing)]

    def decisions(self) -> list[tuple[str, str, str | None]]:
        """Return the decision, version and previous version of each event since the last call."""
        events = [event for event in self.transition.events if isinstance(event, ModelEvent)]
        self.transition.events.clear()
        return [(event.decision, event.version, event.previous) for event in events]


@pytest_asyncio.fixture
async def rig(data_dir: Path) -> AsyncIterator[Rig]:
    async with Rig(data_dir) as opened:
        yield opened


@pytest_asyncio.fixture
async def registry(data_dir: Path) -> AsyncIterator[RegistryState]:
    rig = Rig(data_dir)
    async with rig.database.transaction() as tx:
        await tx.run_sync(METADATA.create_all)
        yield RegistryState(rig, tx)
    await rig.database.close()
