"""Which models and versions there are, followed on `checkpoints` and `routing`, for doors that refuse all others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

from headrace_runtime.blobs import BlobStore
from headrace_runtime.consumer import Table
from headrace_runtime.errors import CorruptBlob, InvalidEvent, Unavailable
from headrace_runtime.settings import BusSettings
from headrace_runtime.versions import read_manifest
from headrace_runtime.wire import Record
from headrace_schemas import Checkpoint, Routing
from headrace_schemas.blobs import BlobRef
from headrace_schemas.ingest import KnownModels

_VERSIONS_MAX = 100_000
"""Of one model; beyond that the oldest are not known any more."""


class KnownVersions:
    """`run` follows the topics until cancelled; `now` is what they said so far."""

    def __init__(
        self,
        bus: BusSettings,
        client_id: str,
        blobs: BlobStore,
        refuse: Callable[[Record, InvalidEvent], Awaitable[None]],
    ) -> None:
        self._blobs = blobs
        self._versions: dict[str, dict[str, None]] = {}
        self._manifests: dict[str, BlobRef] = {}
        self._vocabularies: dict[str, int | None] = {}
        self._checkpoints = Table(Checkpoint, bus, client_id, blobs, refuse, self.checkpoint)
        self._routings = Table(Routing, bus, client_id, blobs, refuse, self.routing)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._checkpoints.run())
            group.create_task(self._routings.run())

    @property
    def loaded(self) -> bool:
        """Whether everything has been read that there was at the start."""
        return self._checkpoints.loaded.is_set() and self._routings.loaded.is_set()

    def checkpoint(self, _key: str, event: Checkpoint | None) -> None:
        if event is not None:
            self._learn(event.model, event.version, event.manifest)

    def routing(self, _key: str, event: Routing | None) -> None:
        for served in event.serve if event is not None else ():
            assert event is not None
            self._learn(event.model, served.version, served.manifest)
        if event is not None:
            for version in (*event.aliases.values(), *event.withdrawn):
                self._learn(event.model, version, None)

    async def now(self, model: str) -> KnownModels:
        """With the vocabulary of `model`. Raises `Unavailable` before everything has been read."""
        if not self.loaded:
            raise Unavailable("the versions that there are have not been read yet")
        if self._vocabularies.get(model) is None and model in self._manifests:
            self._vocabularies[model] = await asyncio.to_thread(self._vocabulary, self._manifests[model])
        sizes = {name: size for name, size in self._vocabularies.items() if size is not None}
        return KnownModels({name: versions.keys() for name, versions in self._versions.items()}, sizes)

    def _learn(self, model: str, version: str, manifest: BlobRef | None) -> None:
        known = self._versions.setdefault(model, {})
        known[version] = None
        if len(known) > _VERSIONS_MAX:
            del known[next(iter(known))]
        if manifest is not None:
            self._manifests[model] = manifest

    def _vocabulary(self, manifest: BlobRef) -> int | None:
        """From the model's own `config.json`; None when it cannot be read or does not say: the trainer checks."""
        try:
            files = {file.path: file.blob for file in read_manifest(self._blobs, manifest).files}
            config = json.loads(self._blobs.get(files["config.json"]))
        except (KeyError, ValueError, CorruptBlob, Unavailable, RecursionError):
            return None
        size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
        return size if isinstance(size, int) else None
