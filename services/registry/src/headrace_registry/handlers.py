"""Handler of `checkpoints`: checks a new version and registers it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace_registry.leader import LeaderLease
from headrace_registry.transition import Transition
from headrace_runtime.errors import CorruptBlob, MissingBlob
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.versions import read_manifest
from headrace_runtime.stream.processor import Handling
from headrace_schemas import Checkpoint, Event
from headrace_schemas.values.blobs import Manifest


class CheckpointHandler:
    """Registers versions that the trainer published. Rejects a version if its manifest does not match its name."""

    def __init__(self, blobs: BlobStore, lease: LeaderLease) -> None:
        self._blobs = blobs
        self._lease = lease

    async def __call__(self, event: Checkpoint, handling: Handling) -> Sequence[Event]:
        """Register the version of a checkpoint. Raises `Unavailable` while the blob store is away, and
        `LostLeadership`."""
        await self._lease.check(handling.tx)
        manifest, problem = await self._manifest(event)
        transition = Transition(handling.tx, handling.now)
        await transition.register(event, manifest, problem)
        return await transition.finish()

    async def _manifest(self, event: Checkpoint) -> tuple[Manifest | None, str | None]:
        try:
            manifest = await asyncio.to_thread(read_manifest, self._blobs, event.manifest)
        except CorruptBlob as error:
            return None, str(error)
        except MissingBlob as error:
            return None, f"its manifest does not exist: {error}"
        return manifest, _mismatch(event, manifest)


def _mismatch(event: Checkpoint, manifest: Manifest) -> str | None:
    if manifest.version != event.version:
        return f"its manifest is that of {manifest.version}"
    if manifest.name != event.model:
        return f"its manifest names the model {manifest.name}, the checkpoint {event.model}"
    if (manifest.lineage, manifest.step, manifest.parent) != (event.lineage, event.step, event.parent):
        return "its manifest has another lineage, step or parent than the checkpoint"
    return None
