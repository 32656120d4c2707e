"""Fixtures for the catalog: a bench on each supported database with the REST interface, folders of versions to
register, and saved trainer states that the trainer's own classes write."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx2
import pytest_asyncio
from sqlalchemy import text
from starlette.routing import BaseRoute

from headrace_registry.garbage.collector import GarbageCollector
from headrace_registry.pages.catalog_api import CatalogApi
from headrace_registry.pages.http import RegistryChanges
from headrace_registry.pages.registry_api import RegistryApi
from headrace_runtime.http import web
from headrace_runtime.settings.sections import Common, SecuritySettings
from headrace_schemas import Checkpoint, TrainingMetrics
from headrace_schemas.http.catalog import WHO_HEADER
from headrace_schemas.values.blobs import BlobRef, File
from headrace_trainer.algorithms.baselines import Baselines
from headrace_trainer.experiences.history import PublishedVersion
from headrace_trainer.lineage.saved import Saved, Tensors
from tests.support import tiny_model
from tests.unit.registry.rig import START, Rig

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


def saved(lineage: str, *versions: str) -> Saved:
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
    return Saved(
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
