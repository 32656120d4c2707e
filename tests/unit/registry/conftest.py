"""Fixtures for the registry: a started rig, the tables alone, concurrent transactions, and a bench of the catalog."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx2
import pytest_asyncio
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.routing import BaseRoute

from headrace_registry.control import steps as rollouts
from headrace_registry.garbage.collector import GarbageCollector
from headrace_registry.pages.catalog_api import CatalogApi
from headrace_registry.pages.http import RegistryChanges
from headrace_registry.pages.registry_api import RegistryApi
from headrace_registry.rollouts.plan import RolloutPlan
from headrace_registry.storage import store
from headrace_registry.storage.records import CHAMPION_IS_ANCHOR, ModelRecord, VersionRecord
from headrace_registry.storage.tables import METADATA
from headrace_registry.versions.transition import Transition
from headrace_runtime.http import web
from headrace_runtime.settings.sections import Common, SecuritySettings
from headrace_schemas import Checkpoint, ModelEvent, Routing, TrainingMetrics
from headrace_schemas.http.catalog import WHO_HEADER
from headrace_schemas.values.blobs import BlobRef, File, Manifest
from headrace_trainer.algorithms.baselines import Baselines
from headrace_trainer.experiences.history import PublishedVersion
from headrace_trainer.lineage.saved import SavedState, Tensors
from tests.support import tiny_model
from tests.unit.registry.rig import MODEL, START, Rig

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


OPPONENT = "opponent"


class CatalogBench:
    """Registry with its REST interface. `post` and `get` send requests, and `folder` stores the files of a version.

    Args:
        more: Further routes besides those of models and of the catalog.
    """

    def __init__(
        self,
        rig: Rig,
        key: str = "",
        *,
        retired_for_s: float = 0.0,
        operator: str = "ada",
        more: Sequence[BaseRoute] = (),
    ) -> None:
        self.rig = rig
        common = Common(data_dir=Path("unused"), security=SecuritySettings(internal_key=key))
        garbage = GarbageCollector(rig.blobs, rig.processor, rig.lease, retired_for_s)
        changes = RegistryChanges(rig.processor, rig.lease, rig.model_controller.wake.set)
        catalog = CatalogApi(common, rig.settings, rig.blobs, rig.database, changes, garbage)
        api = RegistryApi(common, rig.database, rig.processor.clock, rig.replicas.values, changes)
        transport = httpx2.ASGITransport(web.app({}, [*api.routes(), *catalog.routes(), *more]))
        headers = {WHO_HEADER: operator, **({"authorization": f"Bearer {key}"} if key else {})}
        self.http = httpx2.AsyncClient(transport=transport, base_url="http://registry", headers=headers)

    async def post(self, path: str, **body: object) -> httpx2.Response:
        return await self.http.post(f"/v1/{path}", json=body)

    async def get(self, path: str) -> httpx2.Response:
        return await self.http.get(f"/v1/{path}")

    def folder(
        self,
        content: str,
        *,
        name: str = OPPONENT,
        base: str | None = None,
        tokenizer: str = "a",
        template: str = "b",
        files: tuple[File, ...] = (),
    ) -> tuple[str, BlobRef]:
        """Store a version folder with the weights `content`, and return the version and its manifest."""
        blobs = self.rig.blobs
        manifest, ref = tiny_model.version(
            blobs, name, content, lineage="registered", base=base, tokenizer=tokenizer, template=template, files=files
        )
        return manifest.version, ref

    async def register(self, content: str, *, label: str | None = None, serve: bool = False, **how: object) -> str:
        """Store a version folder, register it, and return the version."""
        version, ref = self.folder(content, **how)  # type: ignore[arg-type]
        name = version.partition("@")[0]
        body = {"manifest": ref.model_dump(), "label": label, "serve": serve, "why": "a test"}
        answer = await self.post(f"models/{name}/register", **body)
        assert answer.status_code == 201, answer.text
        return version


def refusal(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


_BLOB = BlobRef(uri="none", sha256="0" * 64, size=0)


def saved(lineage: str, *versions: str) -> SavedState:
    """Return the saved state of a lineage whose versions lead from the base to the head.

    The trainer can return to the base and to the last promoted version.
    """
    published = [
        PublishedVersion(version=version, parent=versions[n - 1] if n else None, number=n, manifest=_BLOB)
        for n, version in enumerate(versions)
    ]
    tensors = Tensors(weights=_BLOB, optimizer=_BLOB)
    first, head = versions[0], versions[-1]
    middle = versions[1:-1] if len(versions) == 3 else ()
    return SavedState(
        model="m",
        lineage=lineage,
        kind="full",
        offsets={},
        waiting=(),
        window={},
        versions=tuple(published),
        head=head,
        head_step=0,
        promoted=(first,),
        baselines=Baselines(),
        steps=0,
        account=0,
        present=tensors,
        restore_points=dict.fromkeys((first, *middle, head), tensors),
        checkpoint=Checkpoint(time=START, model="m", version=head, lineage=lineage, step=0, manifest=_BLOB),
        metrics=TrainingMetrics(time=START, model="m", lineage=lineage, step=0, account=0),
    )


@pytest_asyncio.fixture
async def bench(data_dir: Path, database_url: str) -> AsyncIterator[CatalogBench]:
    rig = Rig(data_dir, database_url)
    await rig.start()
    yield CatalogBench(rig)
    if not rig.database.sqlite:
        async with rig.database.transaction() as tx:
            await tx.execute(text("DROP SCHEMA registry CASCADE"))
    await rig.database.close()
